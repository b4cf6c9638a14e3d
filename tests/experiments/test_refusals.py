"""Mistakes in settings and commands of the workloads: ``refusals.yaml`` is the table."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from raypipe.launch.inline import InlineLauncher
from tests.command import in_process
from tests.scenario import cases

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TABLE = cases(__file__, "refusals")


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [(model, *row) for model, rows in TABLE["settings"].items() for row in rows],
)
def test_settings_that_do_not_fit_together(model, values, message):
    module, _, name = model.rpartition(".")
    with pytest.raises(ValueError, match=message):
        getattr(import_module(module), name).model_validate(values)


def command(files: Path, monkeypatch: pytest.MonkeyPatch, verb: str, config: str, *words: str):
    monkeypatch.chdir(files)
    given = (verb, CONFIGS / f"{config}.yaml", *TABLE["commands"][config]["given"], *words)
    environment = {"RAYPIPE_CACHE": str(files / ".cache")}
    return in_process(InlineLauncher(), *given, "--profile", "cpu", environment=environment)


@pytest.mark.parametrize("config", TABLE["commands"])
def test_the_data_are_good_as_they_are(files, monkeypatch, config):
    ended = command(files, monkeypatch, "plan", config)
    assert ended.status == 0, ended.output


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [(config, *row) for config, table in TABLE["commands"].items() for row in table["cases"]],
)
def test_a_mistake_is_one_message_and_nothing_is_written(
    files, monkeypatch, config, words, message
):
    ended = command(files, monkeypatch, "run", config, *words)
    assert ended.status == 2, ended.output
    assert message in " ".join(ended.output.split())
    assert "Traceback" not in ended.output
    assert not (files / "runs").exists()
