from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypipe.commands import configuration as config
from raypipe.commands.plan import work_of
from raypipe.config.settings import Settings
from raypipe.config.validation import dig
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.graph.experiment import Experiment
from raypipe.hardware import Gpu, Hardware
from raypipe.training.batching import KEYS
from raypipe.training.settings import TrainStageSettings
from tests.scenario import cases

HEAD = "experiment: example_experiment\n"
CASES = {name: cases(__file__, name) for name in ("resolved", "refused", "too_large")}


def resolve(
    text: str = "", *overrides: str, profile: str = "auto", gpu_gb: float | None = None
) -> Configuration:
    gpus = () if gpu_gb is None else (Gpu(0, "GPU-0", "card", int(gpu_gb * 2**30), "9.0"),)
    nodes = [Hardware("node", 4, 2**34, gpus)]
    return config.resolve(config.parse(HEAD + text, "my.yaml"), overrides, profile, nodes)


@pytest.mark.parametrize("case", CASES["resolved"], ids=lambda case: str(case.get("batch")))
def test_what_a_configuration_resolves_to(case: dict[str, Any]) -> None:
    """The resolved configuration, written to a run directory, resolves to itself."""
    options = {key: case[key] for key in ("profile", "gpu_gb") if key in case}
    found = resolve(case.get("text", ""), *case.get("overrides", ()), **options)
    assert found.profile == case.get("used", found.profile)
    values = dict(case.get("values", {}))
    if "batch" in case:
        values |= {f"fit.training.{k}": v for k, v in zip(KEYS, case["batch"], strict=True)}
    plain = found.settings.model_dump(mode="json")
    assert {key: dig(plain, *key.split(".")) for key in values} == values
    document = config.parse(yaml.safe_dump(found.resolved()), "config.yaml")
    again = config.resolve(document, (), "cpu", [])
    assert (again.settings, again.resolved()) == (found.settings, found.resolved())


@pytest.mark.parametrize("case", CASES["refused"], ids=lambda case: str(case))
def test_a_mistake_is_one_message_with_its_origin(case: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(
            case.get("text", ""), *case.get("overrides", ()), profile=case.get("profile", "auto")
        )
    message = str(caught.value)
    assert message.startswith(case.get("begins", "my.yaml: "))
    assert all(text in message for text in case.get("says", ()))
    assert "not" not in case or case["not"] not in message


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    """Other mistakes in files and in the names of experiments: tests/mistakes.yaml."""
    (tmp_path / "latin.yaml").write_bytes(b"experiment: \xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        config.read(tmp_path / "latin.yaml")


class Inner(Settings):
    path: str
    size: int = 4


class Outer(Settings):
    inner: Inner
    fit: TrainStageSettings | None = None


EXPERIMENT = Experiment("given", 1, Outer, lambda _: [])


def test_keys_that_must_be_given() -> None:
    document = config.parse(f"experiment: {__name__}", "my.yaml")
    with pytest.raises(ConfigError, match=r"^my\.yaml: inner\.path: field required$"):
        config.resolve(document, (), "cpu", [])
    found = config.resolve(document, ["inner.path=x", "fit.training.micro_batch=3"], "cpu", [])
    assert (found.settings.inner.path, found.settings.inner.size) == ("x", 4)


def test_which_steps_are_evaluated_decides_only_where_the_best_is_kept() -> None:
    def identity(*given: str) -> dict[str, Any]:
        overrides = (f"fit.training.{each}" for each in given)
        return resolve("", *overrides).settings.fit.training.identity()

    assert identity("monitor=null", "eval_every=5") == identity("monitor=null", "eval_every=7")
    assert identity("eval_every=5") != identity("eval_every=7")


GPUS = [Gpu(i, f"GPU-{i}", "card", 2**34, "9.0") for i in range(2)]
MACHINES = {
    "one": [Hardware("one", 2, 2**34)],
    "two": [Hardware(gpu.uuid, 8, 2**34, (gpu,)) for gpu in GPUS],
    "old": [Hardware("old", 8, 2**34, tuple(replace(g, compute_capability="7.5") for g in GPUS))],
}


@pytest.mark.parametrize(("machine", "overrides", "reason"), CASES["too_large"])
def test_workers_that_no_machine_has_are_refused_and_never_fall_back_to_the_cpu(
    machine: str, overrides: list[str], reason: str
) -> None:
    nodes = MACHINES[machine]
    found = config.resolve(config.parse(HEAD, "my.yaml"), overrides, "auto", nodes)
    work = work_of(found, (), nodes)
    with pytest.raises(ConfigError, match=re.escape(reason)) if reason else nullcontext():
        work.check(may_grow=machine == "two")
