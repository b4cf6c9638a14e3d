"""Checks of trainings before a run: their losses, and the weights that they start from."""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Sequence
from typing import Any

from raypipe.errors import ConfigError, UnitError
from raypipe.graph.continuation import all_stored
from raypipe.graph.experiment import Stage, Training
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory


def check_trainings(
    run_dir: RunDirectory, ledger: Ledger, stages: Sequence[Stage], where: str, *, on_gpu: bool
) -> None:
    """Reject unfinished trainings with a loss that is a mean, or weights that do not fit the model.

    Workers check tasks and models that cannot be built here, since their data do not exist yet.
    ``on_gpu`` leaves the losses to them, too: a task may take a GPU in this process.

    Raises:
        ConfigError: the mistake.

    """
    keyed = {stage.key: stage for stage in stages}
    checked = set[str]()
    for stage in stages:
        training, needs = stage.training, [keyed[key] for key in stage.needed_keys]
        if training is None or all_stored([stage], ledger) or not all_stored(needs, ledger):
            continue
        never_ran = ledger.get("stages", stage.key) is None
        try:
            if training.initial is not None:
                _check_weights(run_dir, stage, training)
            if never_ran and not needs and not on_gpu and stage.name not in checked:
                checked.add(stage.name)
                _check_loss(run_dir, stage, training)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        except BdbQuit:  # the user ended the debugger
            raise KeyboardInterrupt from None
        except Exception:  # its data do not exist here, say
            continue


def _check_weights(run_dir: RunDirectory, stage: Stage, training: Training) -> None:
    """Raise ConfigError with the names of the tensors that differ from the model's."""
    import torch

    with torch.device("meta"):  # shapes only
        task: Any = training.task(stage.files(run_dir))
        model = task.build_model()
    if training.initial is not None:
        training.initial.check({name: each.shape for name, each in model.state_dict().items()})


def _check_loss(run_dir: RunDirectory, stage: Stage, training: Training) -> None:
    """Raise ConfigError if the loss is a mean, or if a stream has epochs."""
    from raypipe.training.additivity import check_task
    from raypipe.training.task import StreamLengthError, TrainTask

    task = training.task(stage.files(run_dir))
    try:
        if isinstance(task, TrainTask):
            check_task(task, training.settings)
    except UnitError as error:
        frame = error.trace.frame if error.trace is not None else ""
        raise ConfigError(f"{stage.name}: {error.message}\n  at {frame}") from None
    except StreamLengthError as error:
        raise ConfigError(str(error).replace("training.", f"{stage.name}.training.")) from None
