"""Settings of a script's stage: the command, its metrics and files, and the training settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from raypipe.config.settings import Level, Operational
from raypipe.config.validation import dig
from raypipe.training.batching import KEYS
from raypipe.training.settings import TrainStageSettings

#: settings that only raypipe's own training loop has, with what to do instead
_REFUSED = {
    "training.init_from": "pass the path of the weights as a parameter",
    "training.betas": "pass them as a parameter",
    "training.weights": "pass it as a parameter",
    "training.monitor": "let the script choose its best model",
    "training.keep_checkpoints": "let the script delete old checkpoints",
    "loader.workers": "reserve cores with scaling.cpus_per_worker, pass a number as a parameter",
    "loader.prefetch": "pass it as a parameter",
    "loader.pin_memory": "pass it as a parameter",
    "memory_trial": "a script does not know its longest samples",
}


class ScriptStageSettings(TrainStageSettings):
    """A script as a training stage. `training` and `scaling` keep their names and meanings.

    Every value that is given must reach the script: by a placeholder of the command, or by its
    environment variable `RAYPIPE_NAME`, which one of `files` then contains.
    """

    command: str = Field(min_length=1)
    """Command of the training, with placeholders such as `{micro_batch}`; `{{` and `}}` are braces.
    It runs in the current directory.
    """
    shell: bool = False
    """Whether a shell (`sh -c`) runs the command. Values of placeholders arrive as they are and
    need no quotes. Without it, the command is split into arguments.
    """
    metrics: str | None = Field(None, min_length=1)
    """File with the metrics that the script writes: JSON lines, CSV (.csv) or the Trainer's
    `trainer_state.json`, relative to `{output_dir}`; of a pattern (`**/*.csv`) the newest file.
    `stdout` for JSON lines on the standard output.
    """
    columns: dict[str, str] = Field(default_factory=dict)
    """Names of the script's metrics by column, such as `loss: train/nll`, where raypipe does not
    know them.
    """
    files: Operational[tuple[str, ...] | None] = None
    """Files and patterns (`src/**/*.py`) whose content decides the result; by default the script
    that the command names, and the modules next to it that it imports.
    """
    resume: Operational[str] = "--resume {checkpoint_dir}"
    """Arguments that `{resume}` stands for if `{checkpoint_dir}` has files; else it stands for
    nothing. `{newest_checkpoint}` is the newest file or folder there.
    """
    grace_s: Operational[NonNegativeFloat] = 10.0
    """Seconds between SIGTERM, on which the script may save a checkpoint, and SIGKILL."""
    time_limit_s: Operational[PositiveFloat | None] = None
    """Seconds after which an attempt is ended as failed."""

    @classmethod
    def settle(cls, name: str, values: Any, levels: Sequence[Level]) -> None:
        """Settle the length and the effective batch; batch sizes that nobody gives stay open.

        Which of them the script takes is known to its stage, which then sets them.
        """
        given = {key: dig(values, "training", key) for key in KEYS}
        super().settle(name, values, levels)
        if isinstance(training := dig(values, "training"), dict):
            if given["micro_batch"] is None and given["effective_batch"] is None:
                training |= given
            training |= {key: None for key in ("micro_batch", "accumulation") if given[key] is None}

    def fixed_by(self, length: int) -> str | None:
        """Return why a training of this length is not the beginning of a longer one."""
        del length
        return "what a script does with its length is not known"

    @model_validator(mode="after")
    def _only_what_a_script_can_honor(self) -> ScriptStageSettings:
        for key, advice in _REFUSED.items():
            owner: Any = self
            *sections, name = key.split(".")
            for section in sections:
                owner = getattr(owner, section)
            if getattr(owner, name) not in (None, type(owner).model_fields[name].default):
                raise ValueError(f"{key}: does not apply to a script; {advice}")
        if "shorten" in self.on_oom:
            raise ValueError("on_oom: shorten does not apply to a script")
        return self
