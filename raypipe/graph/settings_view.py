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


def view(settings: BaseModel, reads: Sequence[str], stage: str) -> SettingsView:
    """Return the view of the declared keys.

    Raises:
        ValueError: a declared key does not exist.

    """
    return _view(stage, "", _tree(settings, reads, stage))


def values_of(settings: BaseModel, reads: Sequence[str], stage: str) -> dict[str, Any]:
    """Return the plain values of the declared keys that decide a result, as nested sections.

    Raises:
        ValueError: a declared key does not exist.

    """
    return _plain(_tree(settings, reads, stage))


class _Leaf:
    """A declared key: its plain value for identities is its section's."""

    def __init__(self, owner: BaseModel, name: str) -> None:
        self.value = getattr(owner, name)
        self.owner, self.name = owner, name


def _tree(settings: BaseModel, reads: Sequence[str], stage: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key in sorted(reads):  # a section comes before its own keys
        *parents, last = key.split(".")
        branch, owner = tree, settings
        for name in parents:
            owner = getattr(owner, name, None)  # type: ignore[assignment]
            if isinstance(branch, dict):
                branch = branch.setdefault(name, {})
        if not isinstance(owner, BaseModel) or last not in type(owner).model_fields:
            raise ValueError(f"stage {stage!r} reads {key!r}, which is not a key of the settings")
        if isinstance(branch, dict):  # else the whole section is declared
            branch[last] = _Leaf(owner, last)
    return tree


def _view(stage: str, path: str, tree: Mapping[str, Any]) -> SettingsView:
    values = {
        name: item.value if isinstance(item, _Leaf) else _view(stage, f"{path}{name}.", item)
        for name, item in tree.items()
    }
    return SettingsView(stage, path, values)


def _plain(tree: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, item in tree.items():
        if not isinstance(item, _Leaf):
            values[name] = _plain(item)
            continue
        decided = identity_values(item.owner, (item.name,))
        if item.name in decided:
            values[name] = decided[item.name]
    return values
