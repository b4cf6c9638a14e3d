"""Planned time of the main job: other sizes are predicted from remembered runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.pabbo_lda.pabbo.model import PabboModel, PabboModelSettings, parameter_count
from raypipe import hardware
from raypipe.commands.configuration import read, resolve
from raypipe.commands.plan import plan
from raypipe.commands.request import Request
from raypipe.commands.selection import selected
from raypipe.graph.durations import Durations
from raypipe.graph.experiment import Stage

CONFIG = """
experiment: experiments.pabbo_lda
data: {options: {max_documents: 1000, max_features: 1000}}
train_small: {training: {steps: 6}}
lda:
  {optimizers: [ga], runs: 2, t_max: 60, start: [9, 30, 55], evaluations: 8, max_iter: 2}
"""


@pytest.fixture
def config(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return str(path)


def stage(config: str, name: str, *overrides: str) -> Stage:
    nodes = [hardware.detect()]
    configuration = resolve(read(config), overrides, "cpu", nodes)
    (found,) = [s for s in selected(configuration, (), nodes).stages if s.name == name]
    return found


def remember(config: str, name: str, *overrides: str) -> None:
    """Remember a run whose time per work is a power of the stage's features."""
    measured, seconds = stage(config, name, *overrides), 100.0
    for value in measured.features.values():
        seconds *= value**0.3
    row = {"seconds": seconds, "cpu_s": 2 * seconds, "gpu_s": 0.0}
    Durations([hardware.detect()]).remember(measured, measured.units, row)


def planned(config: str, name: str, *overrides: str) -> str:
    table = plan(Request("plan", config, overrides, profile="cpu")).set_index("stage")
    return str(table.loc[name, "time"])


@pytest.mark.parametrize(
    ("name", "key", "measured", "near", "far"),
    [
        ("lda", "lda.t_max", (60, 90, 120, 150), 100, 500),
        ("lda", "lda.max_iter", (2, 3, 5, 8), 4, 17),
        ("lda", "data.options.max_documents", (500, 700, 1000, 1300), 800, 4000),
        ("train_small", "train_small.training.effective_batch", (8, 16, 32, 64), 24, 256),
        ("train_small", "train_small.pabbo.model.d_model", (16, 32, 64, 96), 48, 256),
        ("evaluate_small", "evaluate_small.functions", (10, 20, 40, 80), 30, 200),
        ("evaluate_small", "evaluate_small.steps", (5, 10, 20, 30), 15, 70),
    ],
)
def test_a_new_size_has_an_expected_time_after_four_others(config, name, key, measured, near, far):
    for value in measured[:-1]:
        remember(config, name, f"{key}={value}")
    assert planned(config, name, f"{key}={near}") == "unknown"
    remember(config, name, f"{key}={measured[-1]}")
    assert " to " in planned(config, name, f"{key}={near}")
    assert planned(config, name, f"{key}={far}") == "unknown"


def test_a_setting_that_is_not_a_feature_must_be_the_same(config):
    for t_max in (60, 90, 120, 150):
        remember(config, "lda", f"lda.t_max={t_max}")
    assert " to " in planned(config, "lda", "lda.t_max=100")
    assert planned(config, "lda", "lda.t_max=100", "lda.batch_size=64") == "unknown"


def test_another_corpus_under_the_same_settings_is_another_time(config, tmp_path):
    """The folder of the files is not part of the settings' identity; its size is a feature."""
    for name, copies in (("small", 3), ("large", 300)):
        (tmp_path / name).mkdir()
        text = "apple pear plum fig\noak elm ash pine\niron gold zinc lead\n" * copies
        (tmp_path / name / "stdlib.txt").write_text(text)
    options = "{max_documents: 1000, max_features: 1000}"
    text = CONFIG.replace("options:", "source: text, options:")
    Path(config).write_text(text.replace(options, "{min_df: 1, max_df: 1.0}"))
    files = ("lda.t_max=10", "lda.start=[3]")
    small, large = ((*files, f"data.dir={tmp_path / name}") for name in ("small", "large"))
    remember(config, "lda", *small)
    assert planned(config, "lda", *small) != "unknown"
    assert planned(config, "lda", *large) == "unknown"


def test_a_training_that_takes_its_batch_from_a_sweep_has_no_features(config):
    axes = ("sweep.stage=train_small", "sweep.axes={training.effective_batch: [8, 16]}")
    assert stage(config, "train_small", *axes).features.keys() == {"effective_batch", "parameters"}
    taking = stage(config, "train_small", *axes, "train_small.from_sweep=true")
    assert taking.features == {}
    assert taking.featured == ()


@given(
    st.builds(
        lambda width, heads, *sizes: PabboModelSettings(
            d_model=width * heads,
            heads=heads,
            layers=sizes[0],
            feed_forward=sizes[1],
            embedding_depth=sizes[2],
        ),
        st.integers(1, 9),
        st.integers(1, 3),
        st.integers(1, 4),
        st.integers(1, 30),
        st.integers(2, 5),
    )
)
def test_parameters_are_counted_without_the_model(settings):
    model = PabboModel(settings)
    assert parameter_count(settings) == sum(each.numel() for each in model.parameters())
