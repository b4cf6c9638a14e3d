"""The stages that a command runs, and the checks before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe import hardware
from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError
from raypipe.hardware import Hardware
from raypipe.pipeline.configuration import Configuration
from raypipe.pipeline.experiment import Stage, in_order, with_needs
from raypipe.sweep.stage import NAME as SWEEP
from raypipe.sweep.stage import with_sweep


def stages_of(
    configuration: Configuration, only: Sequence[str], nodes: Sequence[Hardware]
) -> list[Stage]:
    """Return the wanted stages and what they need, including the sweep. Raises ConfigError."""
    stages = in_order(with_sweep(configuration, nodes))
    names = [stage.name for stage in stages]
    for name in only:
        if name not in names:
            if name == SWEEP:
                raise ConfigError(
                    f"{configuration.origin}: has no sweep: give it a section `sweep` with "
                    "stage and axes (docs/sweeps.md)"
                )
            raise ConfigError(
                f"--only {name}: unknown stage{did_you_mean(name, names)} "
                f"(there are: {', '.join(names)})"
            )
    return with_needs(stages, only) if only else stages


def check_training(configuration: Configuration, nodes: Sequence[Hardware]) -> None:
    """Refuse a training that the hardware cannot run. Raises ConfigError."""
    gpus = [gpu for node in nodes for gpu in node.gpus]
    capability = hardware.lowest_compute_capability(nodes)
    for name, section in configuration.settings:
        training = getattr(section, "training", None)
        if training is None:
            continue
        workers, each = section.scaling.fewest_workers, section.scaling.gpus_per_worker
        if each is None and 0 < len(gpus) < workers:
            raise ConfigError(
                f"{configuration.origin}: {name}.scaling.workers = {workers}: there are only "
                f"{len(gpus)} GPUs; lower it, or set {name}.scaling.gpus_per_worker to share them "
                "(0.5) or to train on the CPUs (0)"
            )
        shares = gpus and each is not None and 0 < each < 1 and section.scaling.most_workers > 1
        if shares and "fsdp" in (section.scaling.strategy, *section.on_oom):
            raise ConfigError(
                f"{configuration.origin}: {name}.scaling.gpus_per_worker = {each}: workers that "
                "share a GPU cannot shard a model (strategy or on_oom: fsdp): NCCL refuses them; "
                "use ddp, or a GPU for each worker"
            )
        on_gpu = capability if each != 0 else None
        allowed = hardware.supported_precisions(on_gpu)
        wanted = {f"{name}.training.precision": training.precision}
        if "bf16" in section.on_oom:
            wanted[f"{name}.on_oom"] = "bf16"
        for key, precision in wanted.items():
            if reason := section.unusable.get(precision):
                raise ConfigError(f"{configuration.origin}: {key} = {precision}: {reason}")
            if precision not in allowed:
                raise ConfigError(
                    f"{configuration.origin}: {key} = {precision}: this "
                    f"{'GPU' if on_gpu else 'CPU'} lacks it (allowed here: {', '.join(allowed)})"
                )
