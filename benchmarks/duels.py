"""Benchmark PABBO on held-out functions against a preferential Gaussian process and random search.

    pip install -e '.[duels]'
    python -m benchmarks.duels search --weights small=FILE --weights large=FILE   # 15 minutes
    python -m benchmarks.duels ablation     # trains six small models, 20 minutes
    python -m docs.generate                 # the tables of docs/pabbo.md

All methods make the same number of duels on the same functions, from the same first duels. No
setting was chosen on these functions; the ablation, and every choice, uses the functions of another
seed. All times are CPU times of one core.

Results: ``benchmarks/results/duels``: ``searches-METHOD.parquet`` with the regrets of each search,
``measures.json``, and ``ablation-VARIANT.json``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from rich import print as show

from benchmarks.pabbo import train_ours
from experiments.pabbo_lda.pabbo.evaluation import (
    STARTS,
    EvaluationSettings,
    HeldOut,
    Scorer,
    Searches,
    by_function,
    held_out_functions,
    measure_rows,
    policy_scorer,
    random_scorer,
    simple_regret,
)
from experiments.pabbo_lda.pabbo.functions import SyntheticFunctionSettings
from experiments.pabbo_lda.pabbo.model import PabboModel, restore_model
from experiments.pabbo_lda.pabbo.preferential_gp import preferential_gp_scorer
from experiments.pabbo_lda.pabbo.training import PabboSettings
from experiments.pabbo_lda.settings import training_recipe
from raypipe.stats import half_width, paired_comparisons
from raypipe.training.weights import parse_weights

RESULTS = Path(__file__).parent / "results" / "duels"
#: the functions that the results are about, and those that settings are chosen on
HELD_OUT = EvaluationSettings(functions=256, starts=2, seed=3)
VALIDATION = EvaluationSettings(functions=512, starts=1, seed=2)
#: the methods that all others are tested against
CONTROLS = ("random", "gp_improvement")
#: methods whose searches are kept, since they do not depend on the weights
_STORED = ("random", "gp_improvement", "gp_best_option")
MODES = {"best": False, "drawn": True}
#: functions per forward pass of a model
_BATCH = 64

#: the recipe with one change: settings of PABBO, of the training, and functions per burn-in step
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "base": ({}, {}, 32),
    "published_gradient": ({"policy_gradient": "published"}, {}, 32),
    "burn_in": ({"burn_in": 0.4}, {}, 32),
    "learning_rates": ({"policy_learning_rate": 3e-5}, {"learning_rate": 1e-3}, 32),
    "splits": ({"prediction_splits": 31}, {}, 32),
    "batch": ({"policy_batch": 8, "trajectories": 10}, {}, 16),
}
ABLATION_STEPS = 500

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def search(
    weights: Annotated[list[str], typer.Option(help="NAME=FILE of a model; may be repeated.")],
    again: Annotated[
        bool, typer.Option("--again", help="Repeat stored searches without a model.")
    ] = False,
) -> None:
    """Run all methods on the held-out functions, and measure them."""
    models = {name: file for name, _, file in (each.partition("=") for each in weights)}
    if missing := [each for each in models.values() if not Path(each).is_file()]:
        raise typer.BadParameter(f"no such file: {missing[0]!r}", param_hint="--weights")
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    held_out = held_out_functions(HELD_OUT, SyntheticFunctionSettings())
    methods = contenders({name: Path(file).read_bytes() for name, file in models.items()}, held_out)
    regret, cpu_s = {}, {}
    for name, (scorer, sampled) in methods.items():
        file = RESULTS / f"searches-{name}.parquet"
        if again or name not in _STORED or not file.is_file():
            start = time.process_time()
            settings = HELD_OUT.model_copy(update={"sampled": sampled})
            found = simple_regret(scorer, held_out, settings)
            spent = (time.process_time() - start) / found[..., 0].numel()
            _stored(found, spent).to_parquet(file, index=False)
            show(f"{name}: {spent:.3f} s per search")
        table = pd.read_parquet(file)
        cpu_s[name] = float(table["cpu_s"].iloc[0])
        values = np.stack(table["regret"].to_list())
        regret[name] = torch.from_numpy(values).view(HELD_OUT.functions, HELD_OUT.starts, -1)
    rows = measured(Searches(regret, held_out.far, held_out.spread))
    rows = [row | {"cpu_s": cpu_s[str(row["method"])]} for row in rows]
    _write("measures.json", {"settings": HELD_OUT.model_dump(), "rows": rows})


def contenders(models: Mapping[str, bytes], held_out: HeldOut) -> dict[str, tuple[Scorer, bool]]:
    """Return the scorer of each method, and whether its duels are drawn from the scores."""
    found: dict[str, tuple[Scorer, bool]] = {
        "random": (random_scorer(HELD_OUT.seed, held_out), False),
        "gp_improvement": (preferential_gp_scorer("improvement"), False),
        "gp_best_option": (preferential_gp_scorer("best_option"), False),
    }
    for name, content in models.items():
        scorer = policy_scorer(restore_model(content), _BATCH)
        found |= {f"{name}_{mode}": (scorer, sampled) for mode, sampled in MODES.items()}
    return found


def measured(searches: Searches) -> list[dict[str, Any]]:
    """Return a row per kind of start and method: its measures, and its tests against the controls.

    A test has the mean difference to the control over functions with its 95 % interval, the
    p-value of Wilcoxon's signed-rank test corrected by Holm for the number of methods, and the
    conclusion in words.
    """
    rows: list[dict[str, Any]] = [
        {name: value for name, value in row.items() if not name.startswith("p_")} | {"against": {}}
        for row in measure_rows(searches, CONTROLS[0])
    ]
    for start in STARTS:
        for measure, values in by_function(searches, start).items():
            for control in CONTROLS:
                pairs = paired_comparisons(values, control).set_index("first")
                for row in rows:
                    if row["start"] == start and row["method"] != control:
                        found = _test(values, str(row["method"]), control, pairs)
                        row["against"].setdefault(control, {})[measure] = found
    return rows


def _test(
    values: pd.DataFrame, method: str, control: str, pairs: pd.DataFrame
) -> dict[str, float | str]:
    gap = (values[method] - values[control]).dropna()
    return {
        "difference": float(gap.mean()),
        "half": float(half_width(gap.std(ddof=1), len(gap))),
        "p_holm": float(pairs["p_holm"][method]),
        "conclusion": str(pairs["conclusion"][method]),
    }


@app.command()
def ablation(
    only: Annotated[list[str] | None, typer.Option(help="Variants; all by default.")] = None,
) -> None:
    """Train the small model with one change of the recipe each; measure on validation functions."""
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    held_out = held_out_functions(VALIDATION, SyntheticFunctionSettings())
    for name in only or VARIANTS:
        model, cpu_s = _trained(name)
        curves = {}
        for mode, sampled in MODES.items():
            settings = VALIDATION.model_copy(update={"sampled": sampled})
            regret = simple_regret(policy_scorer(model, _BATCH), held_out, settings).mean(1)
            curves[mode] = {
                "regret": _rounded(regret[:, -1]),
                "area": _rounded(regret[:, 1:].mean(1)),
            }
        _write(f"ablation-{name}.json", {"steps": ABLATION_STEPS, "cpu_s": cpu_s, **curves})


def _trained(variant: str) -> tuple[PabboModel, float]:
    """Return a small model of a variant of the recipe, and the CPU time of its training."""
    pabbo, changes, batch = VARIANTS[variant]
    settings = PabboSettings(evaluation=EvaluationSettings(functions=1), **pabbo)
    keep = {"log_every": ABLATION_STEPS, "checkpoint_every": ABLATION_STEPS}
    recipe = training_recipe(steps=ABLATION_STEPS, effective_batch=batch)
    with TemporaryDirectory() as folder:
        found = train_ours(settings, recipe.model_copy(update=keep | changes), Path(folder))
    _, cpu_s, content = found[-1]
    model = PabboModel(settings.model).eval()
    model.load_state_dict(parse_weights(content)[0])
    return model, cpu_s


def _stored(regret: torch.Tensor, cpu_s: float) -> pd.DataFrame:
    functions, starts, _ = regret.shape
    return pd.DataFrame(
        {
            "function": np.repeat(np.arange(functions), starts),
            "start": np.tile(np.arange(starts), functions),
            "regret": list(regret.flatten(0, 1).float().numpy()),
            "cpu_s": cpu_s,
        }
    )


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 6) for value in values.tolist()]


def _write(name: str, content: Mapping[str, Any]) -> None:
    (RESULTS / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    show(f"written: {RESULTS.name}/{name}")


if __name__ == "__main__":
    app()
