"""Functions that hang, fail, leave processes or change their process."""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import raypipe as rp


def _start(kind: str, folder: str) -> multiprocessing.Process | None:
    """Start a process that ends by itself after an hour."""
    if kind == "fork":  # has the connections of its parent
        helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(4000,))
        helper.start()
        Path(folder, str(helper.pid)).touch()
        return helper
    if kind == "session":
        subprocess.Popen(["sh", "-c", f"touch {folder}/$$; exec setsid sleep 4000"])
    elif kind == "orphan":
        subprocess.run(["sh", "-c", f"setsid sleep 4000 & touch {folder}/$!"], check=True)
    return None


def hang(kind: str, folder: str) -> dict[str, Any]:
    helper = _start(kind, folder)
    if helper is not None:
        helper.join()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def leave(kind: str, folder: str, end: str = "return") -> dict[str, Any]:
    _start(kind, folder)
    time.sleep(1)  # the guard of a worker looks twice a second
    if end == "exit":
        os._exit(3)
    return {"y": 1}


def pools(kind: str) -> dict[str, Any]:
    if kind == "joblib":
        from joblib import Parallel, delayed

        return {"y": sum(Parallel(n_jobs=2)(delayed(abs)(i) for i in (-1, -2)))}
    if kind == "executor":
        with ProcessPoolExecutor(2) as executor:
            return {"y": sum(executor.map(abs, (-1, -2)))}
    with multiprocessing.get_context(kind).Pool(2) as pool:
        return {"y": sum(pool.map(abs, (-1, -2)))}


def forks(x: int) -> dict[str, Any]:
    """Return how many of the processes that were ended as they began ended by that signal."""
    ended = 0
    for _ in range(x):
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(1)
        os.kill(child, signal.SIGTERM)
        ended += os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    return {"y": ended}


def change(x: int, folder: str) -> dict[str, Any]:
    """Return what the process is like, and change it."""
    print("call", x, flush=True)
    row = {
        "directory": str(Path.cwd()),
        "mode": os.environ.get("MODE"),
        "home": os.environ["HOME"],
        "path": folder in sys.path,
        "arguments": len(sys.argv),
    }
    os.chdir(folder)
    os.environ["MODE"] = str(x)
    os.environ["HOME"] = folder
    sys.path.insert(0, folder)
    sys.argv = ["program", "--x", str(x), *sys.argv]
    sys.stdout, sys.stderr = io.StringIO(), None
    return row


def fail(kind: str) -> dict[str, Any]:
    if kind == "keyboard":
        raise KeyboardInterrupt
    if kind == "base":
        raise GeneratorExit("not an Exception")
    if kind == "interrupt":
        signal.raise_signal(signal.SIGINT)
    if kind == "long":
        raise ValueError("\n".join(f"line {n} of a very long message" for n in range(200)))
    if kind == "wide":
        raise ValueError("wide " * 1500)
    if kind.startswith("exit"):
        os._exit(7)
    if kind == "crash":
        ctypes.string_at(0)
    return {"y": 1}


def write(x: int) -> dict[str, Any]:
    """Write a file; the worker of 3 dies before its call has ended."""
    (rp.output_dir() / "note.txt").write_text(f"note of {x}")
    if x == 2:
        raise ValueError("two")
    if x == 3:
        os._exit(7)
    return {"y": x}


def measure(x: int, text: str) -> dict[str, Any]:
    if x == 2:
        raise ValueError("two")
    accuracy = float("nan") if x == 1 else 0.5
    return {"acc@1 (%)": x / 10, "acc#1 (%)": 7, "../val: top-5": accuracy, "label": text * 7000}
