"""Checks of tasks before a run: their losses, and the weights that they start from."""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Sequence
from typing import Any

from raypipe.errors import ConfigError, UnitError
from raypipe.graph.continuation import is_done
from raypipe.graph.experiment import Stage
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory


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


def check_losses(
    run_dir: RunDirectory, ledger: Ledger, stages: Sequence[Stage], where: str
) -> None:
    """Reject trainings whose loss is a mean, or that have epochs of a stream.

    They are those that never ran and need no other stage, one per name. A task that cannot be built
    here is checked by its worker.

    Raises:
        ConfigError: the mistake, with the line of the task.

    """
    new = {s.name: s for s in stages if s.training is not None and not s.needed_keys}
    for name, stage in new.items():
        if ledger.get("stages", stage.key) is not None or stage.training is None:
            continue
        from raypipe.training.additivity import check_task
        from raypipe.training.task import StreamLengthError, TrainTask

        try:
            task = stage.training.task(stage.files(run_dir))
            if isinstance(task, TrainTask):
                check_task(task, stage.training.settings)
        except UnitError as error:
            frame = error.trace.frame if error.trace is not None else ""
            raise ConfigError(f"{where}: {name}: {error.message}\n  at {frame}") from None
        except StreamLengthError as error:
            raise ConfigError(
                f"{where}: {str(error).replace('training.', f'{name}.training.')}"
            ) from None
        except BdbQuit:  # the user ended the debugger
            raise KeyboardInterrupt from None
        except Exception:  # its data do not exist here, say
            continue


def _is_stored(stage: Stage, ledger: Ledger) -> bool:
    return all(is_done(stage.seen(ledger), unit) for unit in stage.units)
