"""Check before a run whether the weights that its trainings start from fit their models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raypipe.errors import ConfigError
from raypipe.pipeline.experiment import Stage
from raypipe.pipeline.stage_units import is_done
from raypipe.storage.ledger import Ledger
from raypipe.storage.run_directory import RunDirectory


def check_initial_weights(
    run_dir: RunDirectory, ledger: Ledger, stages: Sequence[Stage], where: str
) -> None:
    """Reject weights that do not fit the model of an unfinished training.

    Models that can only be built once other stages have run are checked by the workers.

    Raises:
        ConfigError: the names of the tensors that differ.

    """
    keyed = {stage.key: stage for stage in stages}
    for stage in stages:
        training = stage.training
        if training is None or training.initial is None or _is_stored(stage, ledger):
            continue
        if not all(_is_stored(keyed[need], ledger) for need in stage.needed_keys):
            continue
        import torch

        try:
            with torch.device("meta"):  # shapes only
                task: Any = training.task(stage.files(run_dir))
                model = task.build_model()
            shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        except Exception:  # its data do not exist yet, say; the worker checks the shapes, too
            continue
        try:
            training.initial.check(shapes)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None


def _is_stored(stage: Stage, ledger: Ledger) -> bool:
    return all(is_done(stage.seen(ledger), unit) for unit in stage.units)
