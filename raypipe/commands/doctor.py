"""``raypipe doctor``: hardware, package versions and the Ray cluster of this machine."""

from __future__ import annotations

import json
from contextlib import ExitStack

from raypipe import hardware
from raypipe.commands import cluster
from raypipe.hardware import bytes_text
from raypipe.provenance import environment_row, git_commit


def doctor(*, as_json: bool) -> tuple[str, int]:
    """Return the text, and the exit status: 2 if there are GPUs and none of them can be used."""
    here = hardware.detect()
    with ExitStack() as stack:
        launcher = cluster.attach(None, stack)
        nodes = launcher.on_every_node(hardware.detect) if launcher is not None else []
    status = 2 * any(node.gpu_problems and not node.gpus for node in (here, *nodes))
    machine = {**environment_row(), "git_commit": git_commit()}
    if as_json:
        machine |= {"hardware": here.as_dict(), "cluster": [n.as_dict() for n in nodes] or None}
        return json.dumps(machine, indent=2), status
    lines = [
        f"GPU {gpu.index}: {gpu.name}, {bytes_text(gpu.memory_bytes)}, "
        f"compute capability {gpu.compute_capability}, {gpu.uuid}"
        for gpu in here.gpus
    ]
    lines = lines or [f"no GPU ({here.gpu_note}): the cpu profile will be used"]
    lines += [f"not used: {problem}" for problem in here.gpu_problems]
    lines += [f"{name}: {value}" for name, value in machine.items() if name != "gpus"]
    lines.append(f"Ray cluster: {f'{len(nodes)} node(s)' if nodes else 'none'}")
    lines += [f"{node.hostname}: not used: {p}" for node in nodes for p in node.gpu_problems]
    return "\n".join(lines), status
