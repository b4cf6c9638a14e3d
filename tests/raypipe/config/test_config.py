from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raypipe.commands import configuration as config
from raypipe.commands.selection import check_size, check_training, selected
from raypipe.config.settings import Settings
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.graph.experiment import Experiment
from raypipe.hardware import Gpu, Hardware
from raypipe.training.settings import TrainStageSettings

HEAD = "experiment: example_experiment\n"


def resolve(
    text: str = "", *overrides: str, profile: str = "auto", gpu_gb: float | None = None
) -> Configuration:
    gpus = () if gpu_gb is None else (Gpu(0, "GPU-0", "card", int(gpu_gb * 2**30), "9.0"),)
    nodes = [Hardware("node", 4, 2**34, gpus)]
    return config.resolve(config.parse(HEAD + text, "my.yaml"), overrides, profile, nodes)


def refusal(text: str = "", *overrides: str, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(text, *overrides, **more)
    return str(caught.value)


def batch(text: str = "", *overrides: str, **more: Any) -> tuple[int, int, int]:
    training = resolve(text, *overrides, **more).settings.fit.training
    return training.micro_batch, training.accumulation, training.effective_batch


def test_the_higher_level_wins() -> None:
    text = (
        "study: {runs: 10, low: 1, share: 2}\n"
        "profiles:\n  gpu: {study: {runs: 20, low: 2}}\n  cpu: {study: {runs: 5}}\n"
    )
    study = resolve(text, "study.low=3", gpu_gb=80).settings.study
    assert (study.high, study.share, study.runs, study.low) == (10, 2.0, 20, 3)
    on_cpu = resolve(text)
    assert on_cpu.profile == "cpu"
    assert (on_cpu.settings.study.runs, on_cpu.settings.study.low) == (5, 1)
    assert resolve(text, profile="gpu").settings.study.runs == 20


def test_overrides_are_yaml_values() -> None:
    configuration = resolve(
        "",
        "study.start=[1, 2]",
        "fit.training.learning_rate=1e-3",
        "fit.training.weight_decay=.5e-2",
        "fit.training.steps=1e2",
        "study.folder='a=b: c'",
        "study.options={a: {b: 1}}",
        "study.options.a.c=[x]",
        "fit.training.compile=true",
        "fit.training.clip_norm=null",
    )
    training, study = configuration.settings.fit.training, configuration.settings.study
    assert study.start == (1, 2)
    assert (training.learning_rate, training.weight_decay, training.steps) == (1e-3, 5e-3, 100)
    assert study.folder == Path("a=b: c")
    assert study.options == {"a": {"b": 1, "c": ["x"]}}
    assert training.compile is True
    assert training.clip_norm is None


def test_an_unknown_key_comes_with_its_origin_and_the_nearest_valid_one() -> None:
    in_file = refusal("study: {rnus: 7}")
    assert in_file.startswith("my.yaml: study.rnus = 7: unknown key")
    assert "did you mean study.runs?" in in_file
    assert "order" in in_file  # what is allowed beside it
    profile = refusal("profiles: {cpu: {fit: {training: {step: 5}}}}")
    assert profile.startswith("my.yaml, profile cpu: fit.training.step = 5: unknown key")
    assert "did you mean fit.training.steps?" in profile
    line = refusal("study: {runs: 7}", "studdy.runs=2")
    assert line.startswith("command line: studdy")
    assert "did you mean study?" in line


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("learning_rate=0.1", "fit.training.learning_rate"),
        ("training.steps=8", "fit.training"),
        ("fit.training.workers=2", "fit.scaling.workers"),
        ("fit.training.lerning_rate=1", "fit.training.learning_rate"),
        ("fot.training.steps=1", "fit"),
    ],
)
def test_a_misspelled_or_misplaced_key_comes_with_the_nearest(override: str, key: str) -> None:
    assert f"; did you mean {key}? (allowed here" in refusal("study: {runs: 7}", override)


def test_a_name_near_to_nothing_gets_no_advice() -> None:
    assert "did you mean" not in refusal("study: {runs: 7}", "fit.training.dropout=0.9")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("study.runs=true", "study.runs = True: must not be true or false"),
        ("study.start=[1, true]", "must not be true or false"),
        ("study.runs=many", "study.runs = 'many'"),
        ("study.runs=2.5", "study.runs = 2.5"),
        ("study.runs=0", "study.runs = 0"),
        ("study.runs=-1", "study.runs = -1"),
        ("study.runs=null", "study.runs = None"),
        ("study.share=.nan", "study.share = nan"),
        ("study.share=.inf", "study.share = inf"),
        ("study.start=[1, x]", "study.start.1 = 'x'"),
        ("study.order=[random]", "study.order = ['random']"),
        ("study.order=shuffled", "'random' or 'sorted'"),
        ("study.folder=3", "study.folder = 3"),
        ("study=3", "study = 3: must be a section"),
        ("study=null", "study = None: must be a section"),
        ("fit.training=[1]", "fit.training = [1]: must be a section"),
        ("fit.training.micro_batch=true", "fit.training.micro_batch = True"),
        ("fit.training.micro_batch=big", "fit.training.micro_batch = 'big'"),
        ("fit.training.effective_batch=0", "fit.training.effective_batch = 0"),
        ("fit.training.accumulation=1.5", "fit.training.accumulation = 1.5"),
        ("fit.scaling.workers=0", "fit.scaling.workers = 0"),
        ("fit.scaling.workers=null", "fit.scaling.workers = None"),
        ("fit.training.seed=99999999999999999999", "fit.training.seed"),
        ("fit.training={1: 2}", "fit.training.1: a key must be text"),
        ("study.start={1: 2}", "study.start.1: a key must be text"),
        ("study.options={a: [{1: 2}]}", "study.options.a.0.1: a key must be text"),
        ("study.runs", "dotted.key=value"),
        ("study..runs=1", "dotted.key=value"),
        ("=1", "dotted.key=value"),
        ("study.runs=[1", "not valid YAML"),
        ("study.options=&a [*a]", "not valid YAML"),
    ],
)
def test_a_wrong_value_is_named_with_its_origin(override: str, told: str) -> None:
    message = refusal("study: {runs: 4}\nfit: {training: {micro_batch: 2}}", override)
    assert message.startswith("command line: ")
    assert told in message


def test_a_wrong_value_below_is_not_hidden_by_one_above() -> None:
    assert refusal("fit: 5", "fit.training.steps=3").startswith("my.yaml: fit = 5")


def test_all_mistakes_are_told_at_once_each_with_its_origin() -> None:
    first, second = refusal("study: {runs: x}", "study.share=0").splitlines()
    assert first.startswith("my.yaml: study.runs")
    assert second.startswith("command line: study.share")


def test_settings_that_contradict_each_other() -> None:
    message = refusal("study: {low: 30}")
    assert message == "my.yaml: study: low = 30 is above high = 10"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("study: {runs: 1, runs: 2}", "'runs' is given twice"),
        ("a: [", "not valid YAML"),
        ("a: 1e999", "1e999 exceeds the largest number; write quotes around a text"),
        ("a: !!timestamp abc", "not valid YAML"),
        ("a: !!python/object:os.system {}", "not valid YAML"),
        ("a: &x {b: *x}", "not valid YAML"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("? [a, b]\n: 1", "a key must be plain text"),
        ("1: 2", "a key must be text"),
        ("study: {on: 2}", "a key must be text"),
        ("study: {start: [{1: 2}]}", "study.start.0.1: a key must be text"),
        ("profiles: [cpu]", "profiles: must map"),
        ("profiles: 0", "profiles: must map"),
        ("profiles: {cpu: }", "profiles: must map"),
        ("profiles: {gpu: {min_gpu_memory_gb: much}}", "profiles.gpu.min_gpu_memory_gb = 'much'"),
        ("profiles: {gpu: {for: large}}", "profiles.gpu.for = 'large': must map keys"),
        (
            "profiles: {gpu: {for: {model: {a: 1}}}}",
            "must map keys of settings to a value",
        ),
        ("profiles: {gpu: {for: {studdy: 1}}}", "profiles.gpu.for.studdy: unknown key"),
        ("profiles: {gpu: {min_compute_capability: sm_80}}", "must be a number, such as 8.0"),
    ],
)
def test_files_that_are_no_configuration(text: str, told: str) -> None:
    message = refusal(text)
    assert message.startswith("my.yaml: ")
    assert told in message


@pytest.mark.parametrize("text", ["", "- a\n- b", "just text", "5", "null"])
def test_a_file_must_be_a_mapping(text: str) -> None:
    with pytest.raises(ConfigError, match=r"my\.yaml: must be a mapping"):
        config.parse(text, "my.yaml")


def test_anchors_and_merges() -> None:
    text = (
        "study: &base {runs: 4, low: 1}\n"
        "profiles:\n"
        "  cpu: {study: &more {<<: *base, runs: 6}}\n"
        "  gpu: {study: {<<: *more, high: 20}}\n"
    )
    assert resolve(text).settings.study.runs == 6
    study = resolve(text, profile="gpu").settings.study
    assert (study.runs, study.low, study.high) == (6, 1, 20)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text(HEAD)
    with pytest.raises(ConfigError, match=r"no such file; did you mean quickstart\.yaml\?"):
        config.read(tmp_path / "quikstart.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        config.read(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"experiment: \xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        config.read(tmp_path / "latin.yaml")
    assert config.read(tmp_path / "quickstart.yaml").experiment == "example_experiment"


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("no_such_module", "cannot be imported (ModuleNotFoundError"),
        ("broken_module", "cannot be imported (ZeroDivisionError"),
        ("example_experiment.sub", "cannot be imported"),
        ("..relative", "cannot be imported"),
        ("json", "has no EXPERIMENT"),
        ("[a]", "must name an importable module"),
        ("", "must name an importable module"),
    ],
)
def test_experiments_that_are_none(
    module: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        config.resolve(config.parse(f"experiment: {module}", "my.yaml"), (), "cpu", [])
    assert str(caught.value).startswith("my.yaml: experiment")
    assert told in str(caught.value)


def test_the_current_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "local_experiment.py").write_text("from example_experiment import EXPERIMENT")
    monkeypatch.chdir(tmp_path)
    document = config.parse("experiment: local_experiment", "my.yaml")
    assert config.resolve(document, (), "cpu", []).experiment.name == "example"


def test_keys_that_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inner(Settings):
        path: str
        size: int = 4

    class Outer(Settings):
        inner: Inner
        fit: TrainStageSettings | None = None

    module = ModuleType("must_be_given")
    module.EXPERIMENT = Experiment("given", 1, Outer, lambda _: [])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "must_be_given", module)
    document = config.parse("experiment: must_be_given", "my.yaml")
    with pytest.raises(ConfigError, match=r"^my\.yaml: inner\.path: field required$"):
        config.resolve(document, (), "cpu", [])
    found = config.resolve(document, ["inner.path=x", "fit.training.micro_batch=3"], "cpu", [])
    assert (found.settings.inner.path, found.settings.inner.size) == ("x", 4)


def test_profiles_by_name_and_by_the_memory_of_the_smallest_gpu() -> None:
    text = (
        "profiles:\n  gpu_big: {min_gpu_memory_gb: 80}\n  gpu_small: {min_gpu_memory_gb: 8}\n"
        "  cpu: {}\n  mine: {}\n"
    )
    assert resolve(text, gpu_gb=79.6).profile == "gpu_big"  # what an 80 GB card reports
    assert resolve(text, gpu_gb=24).profile == "gpu_small"
    assert resolve(text, gpu_gb=4).profile == "gpu"  # none fits: the file's own values
    assert resolve(text).profile == "cpu"
    assert resolve(text, gpu_gb=80, profile="mine").profile == "mine"
    message = refusal(text, profile="gpu_bigg")
    assert message.startswith("command line: --profile gpu_bigg: unknown profile")
    assert "did you mean gpu_big?" in message


def fit(**sizes: Any) -> str:
    workers = sizes.pop("workers", None)
    scaling = {} if workers is None else {"scaling": {"workers": workers}}
    return yaml.safe_dump({"fit": {"training": sizes, **scaling}})


def test_any_two_batch_settings_give_the_third() -> None:
    assert batch(fit(micro_batch=4, accumulation=3)) == (4, 3, 12)
    assert batch(fit(micro_batch=4, accumulation=3, workers=2)) == (4, 3, 24)
    assert batch(fit(micro_batch=4, effective_batch=24, workers=2)) == (4, 3, 24)
    assert batch(fit(accumulation=3, effective_batch=24, workers=2)) == (4, 3, 24)
    assert batch(fit(micro_batch=4, accumulation=3, effective_batch=12)) == (4, 3, 12)
    assert batch(fit(effective_batch=10, micro_batch=3, workers=4)) == (3, 1, 10)
    assert batch(fit(micro_batch="4", effective_batch=16.0)) == (4, 4, 16)  # not dropped in silence


def test_of_levels_that_disagree_the_higher_wins() -> None:
    file = fit(micro_batch=16, effective_batch=64)
    assert batch(file, "fit.training.accumulation=2") == (32, 2, 64)
    assert batch(file, "fit.training.effective_batch=8") == (8, 1, 8)
    assert batch(file, "fit.training.micro_batch=8") == (8, 8, 64)
    assert batch(file, "fit.training.micro_batch=8", "fit.training.accumulation=2") == (8, 2, 16)
    every = fit(micro_batch=16, accumulation=4, effective_batch=64)
    assert batch(every, "fit.training.micro_batch=8") == (8, 8, 64)
    assert batch(every, "fit.scaling.workers=4") == (16, 1, 64)
    assert batch(every, "fit.scaling.workers=128") == (16, 4, 8192)
    assert batch(fit(micro_batch=16) + "profiles: {cpu: {fit: {training: {micro_batch: 2}}}}",
                 "fit.training.effective_batch=8") == (2, 4, 8)  # fmt: skip


def test_values_of_one_level_that_contradict_are_an_error_naming_that_level() -> None:
    wrong = fit(micro_batch=4, accumulation=4, effective_batch=64)
    message = refusal(wrong)
    assert message.startswith("my.yaml: fit.training: ")
    for told in ("micro_batch 4", "accumulation 4", "effective_batch 64", "1 worker"):
        assert told in message
    assert refusal(wrong, "fit.training.steps=1").startswith("my.yaml")
    assert refusal(wrong, "fit.training.micro_batch=2").startswith("my.yaml")
    line = ("micro_batch=4", "accumulation=4", "effective_batch=17")
    message = refusal(fit(micro_batch=2), *(f"fit.training.{size}" for size in line))
    assert message.startswith("command line: fit.training: ")
    assert refusal(fit(effective_batch=3, workers=4)).startswith("my.yaml: fit.training")
    assert refusal(fit(micro_batch=32, effective_batch=16)).startswith("my.yaml: fit.training")


def test_steps_of_a_higher_level_replace_epochs_of_a_lower_one_and_the_reverse() -> None:
    training = resolve("", "fit.training.epochs=2").settings.fit.training
    assert (training.steps, training.epochs) == (None, 2)
    training = resolve(fit(epochs=2), "fit.training.steps=5").settings.fit.training
    assert (training.steps, training.epochs) == (5, None)
    assert "give either steps or epochs" in refusal(fit(epochs=2, steps=5))


sizes = st.integers(1, 6)


@settings(max_examples=60, deadline=None)
@given(
    file=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("micro_batch", "accumulation", "workers"), sizes)
    ),
    line=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("micro_batch", "accumulation", "effective_batch"), sizes)
    ),
    epochs=st.booleans(),
)
def test_the_resolved_configuration_reads_as_the_same(
    file: dict[str, int], line: dict[str, int], epochs: bool
) -> None:
    overrides = [f"fit.training.{key}={value}" for key, value in line.items()]
    overrides += ["fit.training.epochs=1"] * epochs + ["study.folder=some/where"]
    try:
        first = resolve(fit(**file), *overrides)
    except ConfigError:
        return
    document = config.parse(yaml.safe_dump(first.resolved()), "config.yaml")
    second = config.resolve(document, (), "cpu", [])
    assert second.resolved() == first.resolved()
    assert second.settings == first.settings


def config_error(function: Callable[[], object]) -> str | None:
    """The message of the ConfigError it raises; an error of another kind passes through."""
    try:
        function()
    except ConfigError as error:
        return str(error)
    return None


yaml_text = st.text(
    st.one_of(st.sampled_from("{}[]:,-?&*!|>'\"%@`#\n \t<=.~0123xeE_"), st.characters()),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(yaml_text)
@example("a: !!bool x")
@example("a: !!float x")
@example("=: 1")
@example("a: " + "9" * 5000)
def test_any_text_is_a_configuration_or_one_error(text: str) -> None:
    config_error(lambda: resolve(text))
    told = config_error(lambda: config.parse(text, "my.yaml"))
    assert told is None or told.startswith("my.yaml")


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["study.start", "study.options", "fit.training.micro_batch", "fit", "a.b", ""]),
    yaml_text,
)
def test_any_override_is_a_configuration_or_one_error(key: str, text: str) -> None:
    for override in (f"{key}={text}", key + text, text):
        told = config_error(lambda override=override: resolve("", override))  # type: ignore[misc]
        assert told is None or told.startswith("command line")


def test_which_steps_are_evaluated_decides_only_where_the_best_is_kept() -> None:
    def identity(*overrides: str) -> dict[str, Any]:
        return resolve("", *overrides).settings.fit.training.identity()

    last, five, seven = (
        "fit.training." + each for each in ("monitor=null", "eval_every=5", "eval_every=7")
    )
    assert identity(last, five) == identity(last, seven)
    assert identity(five) != identity(seven)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("fit.scaling.cpus_per_worker=3", "cpus_per_worker = 3.0: this machine has 2 CPUs"),
        ("fit.scaling.gpus_per_worker=2", "gpus_per_worker = 2.0: this machine has no GPUs"),
        ("matrix.fit.scaling.cpus_per_worker=[1,3]", "matrix (fit.scaling.cpus_per_worker=3)"),
        (
            "fit.scaling.workers=3",
            "fit.scaling.workers = 3: needs 1 CPU(s) per worker, and this machine has 2 CPU(s); "
            "give at most 2, or use a cluster (`raypipe run --address`)",
        ),
        (
            "fit.loader.workers=2",
            "fit.loader.workers = 2: needs 3 CPU(s) with its loader processes per worker, and this "
            "machine has 2 CPU(s); lower it, or use a cluster (`raypipe run --address`)",
        ),
    ],
)
def test_a_worker_larger_than_the_machine_is_refused(override: str, reason: str) -> None:
    def check(*overrides: str) -> None:
        node = Hardware("one", 2, 2**34)
        configuration = config.resolve(config.parse(HEAD, "my.yaml"), overrides, "auto", [node])
        check_size(configuration, selected(configuration, (), [node]), node)

    check()
    check("fit.scaling.cpus_per_worker=2", "fit.scaling.gpus_per_worker=0")
    check("fit.scaling.workers=2")
    check("fit.scaling.workers=1", "fit.loader.workers=1")
    with pytest.raises(ConfigError, match=re.escape(reason)):
        check(override)


def test_more_workers_than_gpus_are_refused_and_never_fall_back_to_the_cpu() -> None:
    gpus = tuple(Gpu(i, f"GPU-{i}", "card", 2**34, "9.0") for i in range(2))
    nodes = [Hardware("one", 8, 2**34, gpus[:1]), Hardware("two", 8, 2**34, gpus[1:])]

    def check(*overrides: str) -> None:
        configuration = config.resolve(config.parse(HEAD, "my.yaml"), overrides, "auto", nodes)
        check_training(configuration, selected(configuration, (), nodes), nodes)

    check("fit.scaling.workers=2")
    check("fit.scaling.workers=4", "fit.scaling.gpus_per_worker=0.5")
    check("fit.scaling.workers=4", "fit.scaling.gpus_per_worker=0")
    with pytest.raises(ConfigError, match=r"gpus_per_worker = 0\.5: workers that share a GPU"):
        check("fit.scaling.workers=4", "fit.scaling.gpus_per_worker=0.5", "fit.on_oom=[fsdp]")
    with pytest.raises(ConfigError, match=r"fit\.scaling\.workers = 3: there are only 2 GPUs"):
        check("fit.scaling.workers=3")
    settings = resolve().settings.fit
    assert settings.with_gpus(2).scaling.gpus_per_worker == 1.0
    assert settings.with_gpus(0).scaling.gpus_per_worker == 0.0
