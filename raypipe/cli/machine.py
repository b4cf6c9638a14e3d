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
    """Show the hardware and the environment: GPUs, CPUs, memory, versions, Ray cluster.

    The exit status is 2 if there are GPUs and none of them can be used.
    """
    from raypipe.commands import doctor as command
    from raypipe.hardware import bytes_text

    found = command.doctor()
    here, nodes = found["hardware"], found["cluster"] or []
    unusable = any(node["gpu_problems"] and not node["gpus"] for node in [here, *nodes])
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        raise typer.Exit(2 * unusable)
    gpus = here["gpus"]
    for gpu in gpus:
        typer.echo(
            f"GPU {gpu['index']}: {gpu['name']}, {bytes_text(gpu['memory_bytes'])}, "
            f"compute capability {gpu['compute_capability']}, {gpu['uuid']}"
        )
    if not gpus:
        typer.echo(f"no GPU ({here['gpu_note']}): the cpu profile will be used")
    for problem in here["gpu_problems"]:
        typer.echo(f"not used: {problem}")
    for name, value in found.items():
        if name not in ("hardware", "gpus", "cluster"):
            typer.echo(f"{name}: {value}")
    typer.echo(f"Ray cluster: {f'{len(nodes)} node(s)' if nodes else 'none'}")
    for node in nodes:
        for problem in node["gpu_problems"]:
            typer.echo(f"{node['hostname']}: not used: {problem}")
    raise typer.Exit(2 * unusable)
