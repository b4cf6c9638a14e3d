"""Commands that only look at runs: one of many calls, and a folder of small runs."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.scaling.runs import run_command

#: small runs in the folder
RUNS = 200


def measure(number: int, folder: Path) -> dict[str, dict[str, float]]:
    """Run a function ``number`` times; return what each command costs that looks at it, by name.

    Raises:
        RuntimeError: a command failed.

    """
    runs, log = folder / "runs", folder / "log"
    for name, last in {"run": number - 1, "other": number - 1, "runs/0": 3}.items():
        words = ["benchmarks.scaling.functions:empty", f"number=0..{last}", "--local"]
        run_command(["map", *words, "--no-report", "--run-dir", folder / name], log)
    for copy in range(1, RUNS):
        shutil.copytree(runs / "0", runs / str(copy))
    run, other = str(folder / "run"), str(folder / "other")
    views = {"--version": ["--version"]}
    views |= {name: [name, run] for name in ("show", "watch", "logs", "results")}
    views |= {"results calls": ["results", run, "calls"], "compare": ["compare", run, other]}
    views["plan"] = ["plan", f"{run}/config.yaml", "--run-dir", run]
    views[f"ls of {RUNS} runs"] = ["ls", str(runs)]
    return {name: run_command(words, log).whole for name, words in views.items()}
