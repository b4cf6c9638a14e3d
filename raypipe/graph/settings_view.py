"""The settings that a stage reads: the declared keys and no others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from raypipe.config.settings import NotIdentity, identity_values


class SettingsView:
    """Settings restricted to the keys that a stage declared; picklable, immutable.

    A declared section is the settings object itself; a section of which only some keys are
    declared is another view.

    Raises:
        AttributeError: a key that the stage did not declare.

    """

    def __init__(self, stage: str, path: str, values: Mapping[str, Any]) -> None:
        self.__dict__.update({"_stage": stage, "_path": path, "_values": dict(values)})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle and copy look for special methods
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(
                f"stage {self._stage!r} does not read {self._path}{name}; add it to `reads`, so "
                "that it becomes part of the stage's identity"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"settings are immutable: {self._path}{name}")

    def __reduce__(self) -> tuple[type[SettingsView], tuple[str, str, dict[str, Any]]]:
        return type(self), (self._stage, self._path, self._values)


def reads_by_default(settings: BaseModel, stage: str, stages: Collection[str]) -> tuple[str, ...]:
    """Return a stage's own section and every field that is not another stage's section."""
    others = set(stages) - {stage}
    return tuple(
        name
        for name, field in type(settings).model_fields.items()
        if name not in others and not any(isinstance(m, NotIdentity) for m in field.metadata)
    )


def view(settings: BaseModel, reads: Sequence[str], stage: str, path: str = "") -> SettingsView:
    """Return the view of the declared keys.

    Raises:
        ValueError: a declared key does not exist.

    """
    values = {}
    for name, inner in _by_section(settings, reads, stage, path).items():
        value = getattr(settings, name)
        values[name] = view(value, inner, stage, f"{path}{name}.") if inner else value
    return SettingsView(stage, path, values)


def values_of(
    settings: BaseModel, reads: Sequence[str], stage: str, path: str = ""
) -> dict[str, Any]:
    """Return the plain values of the declared keys that decide a result, as nested sections.

    Raises:
        ValueError: a declared key does not exist.

    """
    values: dict[str, Any] = {}
    for name, inner in _by_section(settings, reads, stage, path).items():
        if inner:
            values[name] = values_of(getattr(settings, name), inner, stage, f"{path}{name}.")
        else:
            values |= identity_values(settings, (name,))
    return values


def _by_section(
    settings: object, reads: Sequence[str], stage: str, path: str
) -> dict[str, list[str]]:
    """Return the declared keys of each field; none if the whole field is declared."""
    fields = type(settings).model_fields if isinstance(settings, BaseModel) else {}
    found: dict[str, list[str]] = {}
    for key in sorted(reads):  # a section comes before its own keys
        name, _, rest = key.partition(".")
        if name not in fields:
            raise ValueError(
                f"stage {stage!r} reads {path + key!r}, which is not a key of the settings"
            )
        if rest and name not in reads:
            found.setdefault(name, []).append(rest)
        else:
            found.setdefault(name, [])
    return found
