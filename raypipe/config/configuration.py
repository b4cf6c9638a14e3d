"""One YAML file, overrides and a profile become one validated configuration.

Levels, the higher wins: command line, profile, file, the experiment's defaults. Every mistake
in a configuration is found and worded here, before anything is started or written.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, create_model

from raypipe.config.settings import Settings
from raypipe.config.validation import (
    Level,
    check_sections,
    did_you_mean,
    dig,
    section_of,
    shorten,
    shown,
    validate,
)
from raypipe.config.yaml_text import MAX_DEPTH, check_keys, load_yaml
from raypipe.errors import ConfigError
from raypipe.hardware import PROFILE_CONDITIONS, Hardware, pick_profile
from raypipe.pipeline.experiment import Experiment, Stage
from raypipe.redaction import hidden_override
from raypipe.sweep.settings import SweepSettings
from raypipe.tracking import TrackerName
from raypipe.training import batching
from raypipe.training.settings import ScalingSettings, TrainingSettings, TrainStageSettings

_RESERVED = ("experiment", "profiles")
_MAX_LENGTH = 2**20


class CommonSettings(Settings):
    """The sections that every experiment has beside its own."""

    sweep: SweepSettings | None = Field(None, description="what to try, and what is best")
    tracking: tuple[TrackerName, ...] = Field((), description="trackers that get metrics, too")


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
    levels: Sequence[Level]

    def with_values(self, values: Mapping[str, Any], origin: str) -> Configuration:
        """The same with values by dotted key above all others. Raises ConfigError."""
        sections: dict[str, Any] = {}
        for key, value in values.items():
            *parents, last = key.split(".")
            section = sections
            for parent in parents:
                section = section.setdefault(parent, {})
            section[last] = value
        levels = [Level(origin, sections), *self.levels]
        return _configuration(self.origin, self.experiment, self.module, self.profile, levels)

    def stages(self) -> Sequence[Stage]:
        """The experiment's stages with these settings. Raises ConfigError."""
        try:
            return self.experiment.stages(self.settings)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{self.origin}: {error}") from error

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
        with file.open(encoding="utf-8") as stream:
            text = stream.read(_MAX_LENGTH + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file{_nearby(file)}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if len(text) > _MAX_LENGTH:
        raise ConfigError(f"{path}: is no configuration: it has over {_MAX_LENGTH} characters")
    return parse(text, str(path))


def parse(text: str, origin: str) -> Document:
    """A configuration from YAML text. Raises ConfigError."""
    content = load_yaml(text, origin)
    if not isinstance(content, dict):
        raise ConfigError(f"{origin}: must be a mapping of keys to values")
    check_keys(content, origin)
    module = content.get("experiment")
    if not isinstance(module, str) or not module:
        raise ConfigError(
            f"{origin}: experiment = {shown(module)}: must name an importable module, "
            "such as experiments.pabbo_lda"
        )
    profiles = content.get("profiles")
    if profiles is None:
        profiles = {}
    if not isinstance(profiles, dict) or not all(isinstance(p, dict) for p in profiles.values()):
        raise ConfigError(f"{origin}: profiles: must map each profile's name to its overrides")
    for name, profile in profiles.items():
        for key, kind in PROFILE_CONDITIONS.items():
            least = profile.get(key, 0)
            if isinstance(least, bool) or not (
                isinstance(least, int | float) and math.isfinite(least)
            ):
                raise ConfigError(
                    f"{origin}: profiles.{name}.{key} = {shown(least)}: must be {kind}"
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
    profile_values = document.profiles.get(name, {}).items()
    chosen = {key: value for key, value in profile_values if key not in PROFILE_CONDITIONS}
    levels = [
        Level("command line", _parse_overrides(overrides)),
        Level(f"{document.origin}, profile {name}", chosen),
        Level(document.origin, document.values),
        Level("default", _defaults(_model(experiment))),
    ]
    return _configuration(document.origin, experiment, document.experiment, name, levels)


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
    except (Exception, SystemExit) as error:  # a user's module may raise anything
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


def _configuration(
    origin: str, experiment: Experiment, module: str, profile: str, levels: Sequence[Level]
) -> Configuration:
    """The valid configuration of these levels, the highest first. Raises ConfigError."""
    model = _model(experiment)
    levels = [Level(level.origin, _spelled_out(level.values, model)) for level in levels]
    for level in levels[:-1]:
        check_sections(level.values, level.origin, model)
    values = _merge(levels)
    _resolve_lengths(values, levels, model)
    _resolve_batches(values, levels, model)
    settings = validate(values, levels, model)
    return Configuration(origin, experiment, module, profile, settings, levels)


@cache
def _model(experiment: Experiment) -> type[BaseModel]:
    """The sections of an experiment and those that every experiment has."""
    return create_model(
        experiment.settings.__name__,
        __base__=(experiment.settings, CommonSettings),
    )


def _parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        *parents, last = key.split(".")
        shown_as = f"command line: {shorten(hidden_override(override))}"
        if not (separator and all((*parents, last)) and key.isprintable()):
            raise ConfigError(
                f"command line: {shown(override)}: must have the form dotted.key=value"
            )
        if len(parents) >= MAX_DEPTH:
            raise ConfigError(f"{shown_as}: nested too deeply")
        try:
            value = load_yaml(text, shown_as)
        except ConfigError:  # which quotes the text
            if hidden_override(override) == override:
                raise
            raise ConfigError(f"{shown_as}: not valid YAML") from None
        check_keys(value, "command line", f"{shorten(key)}.")
        target = values
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{shown_as}: {parent} was given a value before")
        target[last] = value
    return values


def _profile_name(document: Document, profile: str, nodes: Sequence[Hardware]) -> str:
    if profile == "auto":
        return pick_profile(document.profiles, nodes)
    allowed = sorted({"cpu", "gpu", *document.profiles})
    if profile not in allowed:
        raise ConfigError(
            f"command line: --profile {profile}: unknown profile{did_you_mean(profile, allowed)} "
            f"(allowed: auto, {', '.join(allowed)})"
        )
    return profile


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


def _defaults(model: type[BaseModel]) -> dict[str, Any]:
    """The default values of a settings model; a key that must be given has none."""
    values: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if not field.is_required():
            default = field.get_default(call_default_factory=True, validated_data={})
            values[name] = default.model_dump() if isinstance(default, BaseModel) else default
        elif section is not None:
            values[name] = _defaults(section)
    return values


def _spelled_out(values: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """The values with every section as it is stored, where it may also be written shorter."""
    result = dict(values)
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None or not issubclass(section, Settings) or name not in values:
            continue
        value = section.spelled_out(values[name])
        result[name] = _spelled_out(value, section) if isinstance(value, Mapping) else value
    return result


def _resolve_lengths(
    values: dict[str, Any], levels: Sequence[Level], model: type[BaseModel]
) -> None:
    """Of steps and epochs the one of the higher level wins, for each training stage in place."""
    for stage in _training_stages(model):
        for level in levels:
            training = dig(level.values, stage, "training")
            given = [key for key in ("steps", "epochs") if dig(training, key) is not None]
            if len(given) == 1:
                other = "epochs" if given == ["steps"] else "steps"
                values[stage]["training"][other] = None
            if given:
                break


def _resolve_batches(
    values: dict[str, Any], levels: Sequence[Level], model: type[BaseModel]
) -> None:
    """Settle micro_batch, accumulation and effective_batch of each training stage in place."""
    for stage in _training_stages(model):
        section = values.get(stage)
        if not isinstance(section, dict) or not isinstance(section.get("training"), dict):
            continue  # a wrong type, which validation reports
        try:
            sizes = [_sizes(dig(level.values, stage, "training")) for level in levels]
        except ValidationError:
            continue  # likewise
        try:
            scaling = ScalingSettings(workers=dig(values, stage, "scaling", "workers"))
        except ValidationError:
            continue  # likewise
        giver = next(
            i for i, level in enumerate(levels) if dig(level.values, stage, "scaling", "workers")
        )
        try:
            plan = batching.resolve(sizes, scaling.most_workers, giver)
        except batching.BatchConflict as error:
            origin = levels[error.level].origin
            raise batching.BatchConflict(
                error.level, f"{origin}: {stage}.training: {error}"
            ) from error
        section["training"] |= {key: getattr(plan, key) for key in batching.KEYS}


def _sizes(training: Any) -> dict[str, int]:
    """A level's sizes as the settings read them (``1e2``, ``"16"``). Raises ValidationError."""
    given = {key: dig(training, key) for key in batching.KEYS}
    read = TrainingSettings.model_validate(given)
    return {key: getattr(read, key) for key in batching.KEYS if given[key] is not None}


def _training_stages(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is not None and issubclass(section, TrainStageSettings):
            yield name


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    return did_you_mean(path.name, [file.name for file in path.parent.glob("*.y*ml")])
