"""Base class of configuration sections, and the markers that keep a field out of identities."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

#: maximum of any integer setting: consumers store them in 64 bits
_MAX_INTEGER = 2**63 - 1

T = TypeVar("T")


@dataclass(frozen=True)
class NotIdentity:
    """Marker: the field does not decide a stored result. Use :data:`Operational`."""


Operational = Annotated[T, NotIdentity()]
"""Type of a settings field that is not part of identities: ``workers: Operational[int] = ...``.

Such a field cannot change a result (loader, log interval, share of a CPU), only selects which units
exist (number of runs), or has an effect that enters identities as a unit's literal (the fingerprint
of the files below a path).
"""


@dataclass(frozen=True)
class Level:
    """Values given in one place, such as the command line; ``origin`` names it in messages."""

    origin: str
    values: Any

    def get(self, key: str) -> Any:
        """Return the value of a key; None if there is none, also in a section that is wrong."""
        return self.values.get(key) if isinstance(self.values, Mapping) else None


class Replacing(dict[str, Any]):
    """A mapping that replaces those of lower levels; others are merged with them, key by key."""


class Settings(BaseModel):
    """A section of the configuration: immutable; unknown keys are errors."""

    # a field of any value may have infinity, which JSON of pydantic would turn into null
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )

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
        """Return the section's values in full where the configuration may abbreviate them."""
        return given

    @classmethod
    def settle(cls, name: str, values: Any, levels: Sequence[Level]) -> None:
        """Resolve keys that depend on each other, in place; by default there are none.

        Args:
            name: the section's name in the configuration, for messages.
            values: the section merged from all levels; types may be wrong.
            levels: the section in each level, the highest first.

        Raises:
            ConfigError: the keys of one level contradict each other.

        """

    def identity(self) -> dict[str, Any]:
        """Return the plain values of the fields that decide a result."""
        return identity_values(self)


def identity_values(section: BaseModel, names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the plain values of a section without its :data:`Operational` fields.

    Args:
        section: the settings.
        names: only these fields; by default all of them.

    """
    values: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        operational = any(isinstance(marker, NotIdentity) for marker in field.metadata)
        if operational or (names is not None and name not in names):
            continue
        value = getattr(section, name)
        if isinstance(value, Settings):
            values[name] = value.identity()
        elif isinstance(value, BaseModel):
            values[name] = identity_values(value)
        else:
            values[name] = section.model_dump(mode="json", include={name})[name]
    return values
