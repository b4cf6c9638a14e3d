"""The base of every section of a configuration."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

#: no count is larger, and what takes numbers from a configuration holds them in 64 bits
_MAX_INTEGER = 2**63 - 1


class Settings(BaseModel):
    """A section of the configuration: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _plain_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = str(cls.model_fields[str(info.field_name)].annotation)
        given = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(item, bool) for item in given) and "bool" not in annotation:
            raise ValueError("must not be true or false")
        if any(isinstance(item, int) and abs(item) > _MAX_INTEGER for item in given):
            raise ValueError(f"must not be beyond {_MAX_INTEGER}")
        return value

    @classmethod
    def spelled_out(cls, given: Any) -> Any:
        """The section's values, from what may stand for them in a configuration."""
        return given
