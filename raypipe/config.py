"""One YAML file, overrides and a profile become one validated configuration.

Levels, the higher wins: command line, profile, file, the experiment's defaults. Every mistake
in a configuration is found and worded here, before anything is started or written.
"""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from raypipe.errors import ConfigError
from raypipe.experiment import Experiment
from raypipe.hardware import Hardware, pick_profile
from raypipe.training import batching
from raypipe.training.settings import TrainStageSettings

_RESERVED = ("experiment", "profiles")
_MIN_MEMORY = "min_gpu_memory_gb"


@dataclass(frozen=True)
class Level:
    """Values given in one place; ``origin`` names it in messages."""

    origin: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Document:
    """A configuration file as read, before it is checked against its experiment."""

    origin: str
    experiment: str
    values: Mapping[str, Any]
    profiles: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Configuration:
    """A valid configuration: the experiment, its settings, and where they came from."""

    origin: str
    experiment: Experiment
    module: str
    profile: str
    settings: Any

    def resolved(self) -> dict[str, Any]:
        """Every key with its final value, as a configuration file of its own."""
        return {"experiment": self.module, **self.settings.model_dump(mode="json")}


def read(path: str | Path) -> Document:
    """Read a configuration file.

    Raises:
        ConfigError: it is missing, no YAML, has a key twice, or names no experiment.

    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file{_nearby(file)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return parse(text, str(path))


def parse(text: str, origin: str) -> Document:
    """A configuration from YAML text. Raises ConfigError."""
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{origin}: nested too deeply") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{origin}: must be a mapping of keys to values")
    _check_keys(content, origin, "")
    module = content.get("experiment")
    if not isinstance(module, str) or not module:
        raise ConfigError(
            f"{origin}: experiment = {module!r}: must name an importable module, "
            "such as experiments.pabbo_lda"
        )
    profiles = content.get("profiles") or {}
    if not isinstance(profiles, dict) or not all(isinstance(p, dict) for p in profiles.values()):
        raise ConfigError(f"{origin}: profiles: must map each profile's name to its overrides")
    for name, profile in profiles.items():
        memory = profile.get(_MIN_MEMORY, 0)
        if isinstance(memory, bool) or not isinstance(memory, int | float):
            raise ConfigError(
                f"{origin}: profiles.{name}.{_MIN_MEMORY} = {memory!r}: must be a number of GB"
            )
    values = {key: value for key, value in content.items() if key not in _RESERVED}
    return Document(origin, module, values, profiles)


def resolve(
    document: Document,
    overrides: Sequence[str],
    profile: str,
    nodes: Sequence[Hardware],
) -> Configuration:
    """The configuration for this hardware.

    Args:
        document: the file.
        overrides: ``dotted.key=value`` from the command line, the value in YAML.
        profile: ``auto`` or a profile's name.
        nodes: the hardware that ``auto`` looks at.

    Raises:
        ConfigError: anything wrong, in one message.

    """
    experiment = load_experiment(document.experiment, document.origin)
    name = _profile_name(document, profile, nodes)
    chosen = {k: v for k, v in document.profiles.get(name, {}).items() if k != _MIN_MEMORY}
    levels = [
        Level("command line", _parse_overrides(overrides)),
        Level(f"{document.origin}, profile {name}", chosen),
        Level(document.origin, document.values),
        Level("default", experiment.settings().model_dump()),
    ]
    values = _merge(levels)
    _resolve_batches(values, levels, experiment.settings)
    settings = _validate(values, levels, experiment.settings)
    return Configuration(document.origin, experiment, document.experiment, name, settings)


def load_experiment(module: str, origin: str) -> Experiment:
    """The ``EXPERIMENT`` of a module; the current directory comes first on ``sys.path``.

    Raises:
        ConfigError: it cannot be imported, or is no experiment.

    """
    here = str(Path.cwd())
    if sys.path[0] != here:
        sys.path.insert(0, here)
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"{origin}: experiment = {module}: cannot be imported "
            f"({type(error).__name__}: {error}); run from the directory that holds it"
        ) from error
    experiment = getattr(loaded, "EXPERIMENT", None)
    if not isinstance(experiment, Experiment):
        raise ConfigError(
            f"{origin}: experiment = {module}: the module has no EXPERIMENT = Experiment(...)"
        )
    return experiment


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice and reads 1e-3 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            try:
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is given twice", key_node.start_mark
                    )
                seen.add(key)
            except TypeError as error:
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be plain text", key_node.start_mark
                ) from error
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(  # YAML 1.2's floats: PyYAML's own want a dot in 1e-3
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not all(key.split(".")):
            raise ConfigError(f"command line: {override!r}: must have the form dotted.key=value")
        try:
            value = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as error:
            raise ConfigError(f"command line: {override}: not a valid value: {error}") from error
        target = values
        *parents, last = key.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ConfigError(f"command line: {override}: {parent} was given a value before")
        target[last] = value
    return values


def _profile_name(document: Document, profile: str, nodes: Sequence[Hardware]) -> str:
    if profile == "auto":
        return pick_profile(document.profiles, nodes)
    allowed = sorted({"cpu", "gpu", *document.profiles})
    if profile not in allowed:
        raise ConfigError(
            f"command line: --profile {profile}: unknown profile{_did_you_mean(profile, allowed)} "
            f"(allowed: auto, {', '.join(allowed)})"
        )
    return profile


def _check_keys(values: Mapping[Any, Any], origin: str, prefix: str) -> None:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if not isinstance(key, str) or not key:
            raise ConfigError(f"{origin}: {name}: a key must be text")
        if isinstance(value, dict):
            _check_keys(value, origin, f"{name}.")


def _merge(levels: Sequence[Level]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for level in reversed(levels):
        _merge_into(merged, level.values)
    return merged


def _merge_into(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _merge_into(target[key], value)
        else:
            target[key] = _copy(value)


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _resolve_batches(
    values: dict[str, Any], levels: Sequence[Level], model: type[BaseModel]
) -> None:
    """Settle micro_batch, accumulation and effective_batch of each training stage in place."""
    for stage in _training_stages(model):
        section = values.get(stage)
        if not isinstance(section, dict) or not isinstance(section.get("training"), dict):
            continue  # a wrong type, which validation reports
        sizes = [_sizes(_dig(level.values, stage, "training")) for level in levels]
        if any(value < 1 for given in sizes for value in given.values()):
            continue  # likewise
        workers = _dig(values, stage, "scaling", "workers")
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            continue  # likewise
        giver = next(
            i for i, level in enumerate(levels) if _dig(level.values, stage, "scaling", "workers")
        )
        try:
            plan = batching.resolve(sizes, workers, giver)
        except ValueError as error:
            origin = next(level.origin for level, given in zip(levels, sizes, strict=True) if given)
            raise ConfigError(f"{origin}: {stage}.training: {error}") from error
        section["training"] |= {key: getattr(plan, key) for key in batching.KEYS}


def _sizes(training: Any) -> dict[str, int]:
    if not isinstance(training, Mapping):
        return {}
    return {
        key: training[key]
        for key in batching.KEYS
        if isinstance(training.get(key), int) and not isinstance(training[key], bool)
    }


def _training_stages(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, TrainStageSettings):
            yield name


def _dig(values: Any, *keys: str) -> Any:
    for key in keys:
        if not isinstance(values, Mapping):
            return None
        values = values.get(key)
    return values


def _validate(
    values: Mapping[str, Any], levels: Sequence[Level], model: type[BaseModel]
) -> BaseModel:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [_explain(detail, levels, model) for detail in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from error


def _explain(detail: ErrorDetails, levels: Sequence[Level], model: type[BaseModel]) -> str:
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    origin = _origin(location, levels)
    if detail["type"] == "extra_forbidden":
        allowed = sorted(_keys(model))
        siblings = [name for name in allowed if name.rpartition(".")[0] == key.rpartition(".")[0]]
        names = ", ".join(name.rpartition(".")[2] for name in siblings)
        return (
            f"{origin}: {key} = {detail['input']!r}: unknown key"
            f"{_did_you_mean(key, allowed)} (allowed here: {names})"
        )
    message = detail["msg"].removeprefix("Value error, ")
    shown = f" = {detail['input']!r}" if not isinstance(detail["input"], Mapping) else ""
    return f"{origin}: {key or 'configuration'}{shown}: {message[0].lower()}{message[1:]}"


def _origin(location: Sequence[str], levels: Sequence[Level]) -> str:
    """The highest level that gives the key, or the nearest section around it."""
    for length in range(len(location), 0, -1):
        for level in levels[:-1]:
            if _dig(level.values, *location[:length]) is not None:
                return level.origin
    return levels[-2].origin


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key that a settings model takes."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")


def _did_you_mean(word: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, allowed, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    return _did_you_mean(path.name, [file.name for file in path.parent.glob("*.y*ml")])
