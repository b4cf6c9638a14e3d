"""Configuration of a command, assembled from its file or function, overrides and the hardware."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, create_model

from raypipe import hardware, import_path
from raypipe.commands import seconds_of
from raypipe.config import document as documents
from raypipe.config import shipped
from raypipe.config.document import NAMES, Document, Profile, parse, profile_name
from raypipe.config.matrix import MatrixSettings
from raypipe.config.settings import Level, Operational, Settings
from raypipe.config.validation import (
    Key,
    defaults,
    dig,
    gives,
    keys_of,
    parse_overrides,
    settings_of,
)
from raypipe.config.yaml_text import dump_yaml
from raypipe.errors import ConfigError
from raypipe.functions import reference
from raypipe.functions.experiment import FunctionSettings, function_experiment
from raypipe.graph.configuration import Configuration, load_experiment
from raypipe.graph.experiment import Experiment
from raypipe.graph.source import SourceCode, current_source
from raypipe.graph.tables import CORE
from raypipe.graph.tracking import TrackerName
from raypipe.hardware import Hardware
from raypipe.redaction import without_secrets
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import Table, by_name
from raypipe.study.sweep_settings import SweepSettings
from raypipe.study.tables import TABLES as STUDIES
from raypipe.training.tables import with_metrics

if TYPE_CHECKING:
    from raypipe.report.results import Declarations

__all__ = ["parse", "read", "resolve", "settings_model"]

#: columns of the text of a configuration
_WIDTH = 96
#: names of the command line, and of a call in Python, in messages
_COMMAND, _CALL = "command line", "rp.map"


class CommonSettings(Settings):
    """Sections that every experiment has in addition to its own."""

    matrix: Operational[MatrixSettings | None] = None
    """Points at which the whole experiment runs, in one run directory."""
    sweep: Operational[SweepSettings | None] = None
    """Sweep over settings of a training stage."""
    tracking: Operational[tuple[TrackerName, ...]] = ()
    """Trackers that receive a copy of the metrics."""
    notify: Operational[str | tuple[str, ...] | None] = None
    """URL that gets a JSON message by POST when a command of the run has ended, or a command that
    gets it on its standard input. Neither is stored."""


def read(name: str | Path) -> Document:
    """Read a configuration: a file, or a shipped one by name (:func:`shipped.file_of`).

    Its modules are found in the current directory and next to the file, in this order.

    Raises:
        ConfigError: as :func:`raypipe.config.document.read`.

    """
    file = shipped.file_of(str(name))
    document = documents.read(file)
    if file.is_relative_to(shipped.folder() / "configs") and str(file) != str(name):
        print(f"configuration: {file}, shipped with raypipe", file=sys.stderr, flush=True)
    else:
        import_path.prefer(file.resolve().parent)
    return document


def document_of(
    function: Callable[..., Any] | str,
    arguments: Mapping[str, Any] | Sequence[str],
    options: Mapping[str, Any],
) -> tuple[Document, list[str]]:
    """Return the configuration of a function, and its arguments as overrides.

    Args:
        function: the function, or ``module:function``.
        arguments: values by name, which become part of the configuration; or texts ``name=value``
            for arguments of the function and ``dotted.key=value`` for settings.
        options: the options of the command.

    Raises:
        ConfigError: a mistake.

    """
    name, loaded = (function, None) if isinstance(function, str) else _of_process(function)
    values = dict(options)
    limit = values.pop("time_limit")
    values["time_limit_s"] = seconds_of(limit, "--time-limit") if isinstance(limit, str) else limit
    if isinstance(arguments, Mapping):
        values["arguments"] = dict(arguments)
        return Document(_CALL, "", name, values, {}, loaded), []
    _check(arguments)
    return Document(_COMMAND, "", name, values, {}, loaded), list(arguments)


def _of_process(function: Callable[..., Any]) -> tuple[str, Callable[..., Any] | None]:
    """Return the name of a function, and the function if no other process can import it."""
    name = reference.of_function(function)
    reference.check(function, name, _CALL)
    if reference.is_importable(name):
        return name, None
    from raypipe.launch.pool import obstacle

    if reason := obstacle(function, reference.variables(function)):
        raise ConfigError(f"{_CALL}: function = {name}: {reason}")
    return name, function


def _check(texts: Sequence[str]) -> None:
    """Reject texts that are not ``name=value``, and arguments that are given several times."""
    for text in texts:
        if not text.partition("=")[0] or "=" not in text:
            raise ConfigError(
                f"{_COMMAND}: {text!r}: must have the form NAME=VALUE, such as C=0.1, "
                "'C=[0.1,1,10]' or seed=0..4"
            )
    names = Counter(text.partition("=")[0].removeprefix("arguments.") for text in texts)
    for name, times in names.items():
        if times > 1 and "." not in name:
            raise ConfigError(
                f"{_COMMAND}: {name} is given {times} times; write several values of an "
                f"argument in brackets: '{name}=[...]'"
            )


def resolve(
    document: Document, overrides: Sequence[str], profile: str, nodes: Sequence[Hardware]
) -> Configuration:
    """Return the configuration for this hardware.

    Levels, the higher wins: command line, profile, file, the experiment's defaults.

    Args:
        document: the configuration file.
        overrides: ``dotted.key=value`` from the command line, the value in YAML.
        profile: ``auto``, or the name of a profile.
        nodes: the hardware from which ``auto`` selects the profile.

    Raises:
        ConfigError: every mistake, in one message.

    """
    function = document.loaded
    if document.function and function is None:
        function = reference.load(document.function, document.origin)
    experiment, source = _named(document, function)
    named = {key: value for key in NAMES if (value := getattr(document, key))}
    used, others = shipped.hidden(document.experiment) if document.experiment else (None, [])
    if others:
        print(f"experiment: {used}, not {', '.join(map(str, others))}", file=sys.stderr, flush=True)
    model = settings_model(experiment)
    if function is not None:
        fields = model.model_fields
        overrides = [reference.override_of(text, function, fields) for text in overrides]
    given, profiles = parse_overrides(overrides), document.profiles
    chosen, known = (given, document.values), list(model.model_fields)
    name = profile_name(profiles, profile, nodes, chosen, known, document.origin)
    of_profile = Profile.model_validate(profiles.get(name, {})).model_extra
    levels = [
        Level("command line", given),
        Level(f"{document.origin}, profile {name}", of_profile),
        Level(document.origin, document.values),
        Level("default", defaults(model)),
    ]
    settings, levels = settings_of(levels, model)
    if isinstance(settings, FunctionSettings):  # its tables follow from the settings
        experiment = function_experiment(document.function, function, settings)
    return Configuration(document.origin, experiment, named, source, name, model, settings, levels)


def stored_document(run_dir: RunDirectory) -> Document:
    """Return the configuration of a run's newest command.

    Raises:
        ConfigError: it is missing or damaged.

    """
    shown = run_dir.shown
    try:
        text = run_dir.read(run_dir.config).decode()
    except FileNotFoundError as error:
        raise ConfigError(f"{shown}: has no config.yaml; is it a run directory?") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown}/config.yaml: is damaged or unreadable: {error}") from error
    return parse(text, f"{shown}/config.yaml")


def refuse_code_inside(run: RunDirectory, module: str) -> None:
    """Raise ConfigError if Python would find a module in a run directory."""
    if not run.is_local:
        return
    import_path.prefer()
    run_dir = Path(run.path())
    package, *within = module.split(".")
    spec = None
    with suppress(ValueError):  # it is not the name of a module
        spec = find_spec(package)  # imports nothing, since the name has no dot
    places = (spec.submodule_search_locations or [str(spec.origin)]) if spec is not None else []
    for path in (Path.cwd(), *(Path(place, *within) for place in places)):
        if path.resolve().is_relative_to(run_dir):
            raise ConfigError(
                f"{run_dir}/config.yaml: experiment = {module}: would be imported from the run "
                "directory, whose files are never run as code; run the command in the directory "
                "that has the experiment"
            )


def stored_experiment(document: Document) -> Experiment:
    """Return the experiment of a stored run's configuration, for its report.

    A function is not imported: its tables and report follow from the settings. Raises ConfigError.
    """
    if not document.function:
        return load_experiment(document.experiment, document.origin)
    names = FunctionSettings.model_fields
    values = {key: value for key, value in document.values.items() if key in names}
    levels = [Level(document.origin, values), Level("default", defaults(FunctionSettings))]
    settings, _ = settings_of(levels, FunctionSettings)
    return function_experiment(document.function, None, settings)


def _named(
    document: Document, function: Callable[..., Any] | None
) -> tuple[Experiment, Callable[[], SourceCode]]:
    """Return the experiment that a document names, and what reads its source code."""
    if function is not None:
        source = partial(reference.source, document.function, function)
        return function_experiment(document.function, function), source
    import_path.prefer()
    modules = SourceCode({})
    with suppress(ImportError, ValueError):  # a name of no module, or of a package that raises
        modules = current_source(document.experiment)
    return load_experiment(document.experiment, document.origin), lambda: modules


def declared(experiment: Experiment) -> dict[str, Table]:
    """Return the declarations of an experiment's tables by name.

    Trials and steps also have the columns of the experiment's step metrics.
    """
    core = with_metrics(CORE, experiment.step_metrics)
    return by_name((*core, *STUDIES, *experiment.tables))


def of_report(experiment: Experiment) -> Declarations:
    """Return what the report reads of an experiment."""
    from raypipe.report.results import Declarations

    own = {table.name for table in experiment.tables}
    core = {name: table for name, table in declared(experiment).items() if name not in own}
    return Declarations(sentence(experiment), experiment.tables, core, experiment.asked)


def sentence(experiment: Experiment) -> str:
    """Return the first line of the docstring of an experiment's module; empty without one.

    An experiment whose stages raypipe itself makes has none.
    """
    stages = inspect.unwrap(getattr(experiment.stages, "func", experiment.stages))  # of a partial
    module = getattr(stages, "__module__", "")
    if module.partition(".")[0] == "raypipe" or module not in sys.modules:
        return ""
    text = inspect.getdoc(sys.modules[module]) or ""
    return text.partition("\n")[0].strip()


@cache
def settings_model(experiment: Experiment) -> type[BaseModel]:
    """Return the settings of an experiment together with the common sections."""
    if experiment.settings is Settings:  # without sections
        return CommonSettings
    bases = experiment.settings, CommonSettings
    return create_model(experiment.settings.__name__, __base__=bases)


def configuration_text(path: str, overrides: Sequence[str], profile: str, *, keys: bool) -> str:
    """Return the resolved configuration as YAML, with each value's origin as a comment.

    The origin is ``command line``, ``profile NAME``, ``file``, ``default``, or ``derived`` from
    other keys. With ``keys`` it is every key instead: its type, default and meaning.
    """
    configuration = resolve(read(path), overrides, profile, [hardware.detect()])
    if keys:
        return "\n".join(map(_described, keys_of(configuration.model)))
    values = without_secrets(configuration.settings.model_dump(mode="json"))
    lines = list(_lines(configuration, values))
    width = min(max((len(line) for line, _ in lines), default=0), _WIDTH)
    head = [f"{key}: {value}" for key, value in configuration.named.items()]
    return "\n".join(
        [*head, *(f"{line:{width}}  # {origin}" if origin else line for line, origin in lines)]
    )


def _lines(
    configuration: Configuration, values: Mapping[str, Any], *sections: str
) -> Iterator[tuple[str, str]]:
    indent = "  " * len(sections)
    for name, value in values.items():
        path = (*sections, str(name))
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:", ""
            yield from _lines(configuration, value, *path)
        else:
            yield f"{indent}{name}: {_flow(value)}", _origin(configuration, path, value)


def _origin(configuration: Configuration, path: Sequence[str], value: Any) -> str:
    *levels, default = configuration.levels
    ways = path, ".".join(path).split(".")  # the name of an axis has dots
    origins = (level.origin for level in levels if any(gives(level.values, way) for way in ways))
    origin = next(origins, "default")
    if origin == "default" and value is not None and dig(default.values, *path) is None:
        return "derived"
    if origin == configuration.origin:
        return "file"
    return origin.removeprefix(f"{configuration.origin}, ")


def _described(key: Key) -> str:
    if key.is_section:
        return f"\n{key.name}: {key.meaning}"
    default = "required" if key.required else f"default {_flow(key.default)}"
    meaning = textwrap.indent(textwrap.fill(key.meaning, _WIDTH), "    ")
    return f"{key.name}  ({key.type}; {default})\n{meaning}"


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = dump_yaml(value, default_flow_style=True, width=10**9)
    return text.removesuffix("...\n").strip()
