"""Commands on this machine: doctor."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the hardware and the environment: GPUs, CPUs, memory, versions, Ray cluster."""
    from raypipe.commands import doctor as command
    from raypipe.hardware import bytes_text

    found = command.doctor()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    gpus = found["hardware"]["gpus"]
    for gpu in gpus:
        typer.echo(
            f"GPU {gpu['index']}: {gpu['name']}, {bytes_text(gpu['memory_bytes'])}, "
            f"compute capability {gpu['compute_capability']}, {gpu['uuid']}"
        )
    if not gpus:
        typer.echo(f"no GPU ({found['hardware']['gpu_note']}): the cpu profile will be used")
    for name, value in found.items():
        if name not in ("hardware", "gpus", "cluster"):
            typer.echo(f"{name}: {value}")
    nodes = found["cluster"]
    typer.echo(f"Ray cluster: {f'{len(nodes)} node(s)' if nodes else 'none'}")
