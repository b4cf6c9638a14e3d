"""Command line: the verbs of :mod:`raypipe.api` as commands, with what they return printed.

Arguments, defaults and help are those of the function: its positional parameters are words, the
others options. ``_PARAMETERS`` adds what only a terminal has.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any, get_type_hints

import typer

from raypipe import __version__, api
from raypipe.commands import stops_with_command
from raypipe.errors import ConfigError, Interrupted, UnitError
from raypipe.redaction import without_credentials

app = typer.Typer(
    name="raypipe",
    help="Run experiments in parallel on Ray: one experiment, one YAML, every result in Parquet.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
VERBS: tuple[Callable[..., Any], ...] = (
    *(api.run, api.submit, api.sweep, api.fit, api.plan, api.config, api.map, api.init),
    *(api.doctor, api.results, api.report, api.logs, api.ls, api.show, api.tag),
    *(api.replay, api.compare, api.watch, api.cancel, api.ui),
)
#: verbs that start an experiment
_SLOW = (api.run, api.sweep, api.fit, api.map)
#: names of options that are not those of the parameter
_OPTIONS = {"as_json": "--json", "as_csv": "--csv"}
#: how a terminal names a parameter, and its bounds
_PARAMETERS: dict[str, dict[str, Any]] = {
    "overrides": {"metavar": "KEY=VALUE"},
    "only": {"metavar": "STAGE..."},
    "matrix": {"metavar": "KEY=[VALUE,...]"},
    "function": {"metavar": "MODULE:FUNCTION"},
    "arguments": {"metavar": "NAME=VALUE"},
}


def _printing(option: str, text: Callable[[], str], help_text: str) -> Any:
    """Return an option that prints a text instead of all else."""

    def show(wanted: bool) -> None:
        if wanted:
            typer.echo(text())
            raise typer.Exit

    return typer.Option(option, callback=show, is_eager=True, help=help_text)


def _shipped() -> str:
    from raypipe.config.shipped import listing

    return listing()


#: the options that only a terminal has: of ``run``, without CONFIG, and of no command
_LIST = _printing("--list", _shipped, "List the configurations that come with raypipe.")
_VERSION = _printing(
    "--version",
    lambda: f"raypipe {__version__}",
    "Print the version; `raypipe doctor` has those of Python, torch and Ray.",
)


def _command(verb: Callable[..., Any]) -> Callable[..., None]:
    """Return a verb as a function from which Typer makes a command."""

    def command(**given: Any) -> None:
        raise typer.Exit(_run(verb, given))

    text, helps, _ = sections(verb)
    signature = [
        _parameter(parameter, helps[parameter.name])
        for parameter in _parameters(verb)
        if not str(parameter.annotation).startswith("Mapping")  # only Python has such values
    ]
    if verb is api.run:
        option = {"default": False, "annotation": Annotated[bool, _LIST]}
        signature.append(inspect.Parameter("_listed", inspect.Parameter.KEYWORD_ONLY, **option))
    command.__doc__ = text
    command.__annotations__ = {}
    command.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    return command


def _parameters(verb: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a verb, of sizes each."""
    for parameter in inspect.signature(verb).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            yield parameter
            continue
        for name, kind in get_type_hints(api.ClusterSizes).items():
            option = {"default": None, "annotation": kind.__name__}
            yield inspect.Parameter(name, parameter.KEYWORD_ONLY, **option)


@cache
def sections(verb: Callable[..., Any]) -> tuple[str, dict[str, str], str]:
    """Return the parts of a docstring: the text, that of each argument, and the examples."""
    parts = {"": list[str]()}
    name = ""
    for line in inspect.cleandoc(verb.__doc__ or "").splitlines():
        if line in ("Args:", "Raises:", "Examples:"):
            name = line
        parts.setdefault(name, []).append(line)
    arguments: dict[str, str] = {}
    for line in parts.get("Args:", [])[1:]:
        if line.startswith("        "):
            arguments[name] += f" {line.strip()}"
        elif line:
            name, _, text = line.strip().partition(": ")
            arguments[name] = text
    for name, text in [*arguments.items()]:
        if shared := re.fullmatch(r"As of (\w+)\.", text):
            others = sections(getattr(api, shared[1]))[1]
            arguments |= others if name.startswith("**") else {name: others[name]}
    examples = "\n".join(line[2:] for line in parts.get("Examples:", [])[1:])
    return "\n".join(parts[""]).strip(), arguments, examples.rstrip()


def _parameter(parameter: inspect.Parameter, text: str) -> inspect.Parameter:
    """Return a parameter with the annotation that Typer reads: an argument or an option."""
    name, default = parameter.name, parameter.default
    more: dict[str, Any] = {"help": text, **_PARAMETERS.get(name, {})}
    kind = _kind(str(parameter.annotation))
    if parameter.kind is parameter.KEYWORD_ONLY:
        option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
        if kind is bool and default is not False:
            option += f"/--no-{option[2:]}"
        value = {} if kind is bool else {"metavar": name.upper()}
        info: Any = typer.Option(option, **{**value, **more})
    else:
        info = typer.Argument(**{"metavar": name.upper(), **more})
    if default is None or default == ():
        kind, default = kind | None, None
    return parameter.replace(annotation=Annotated[kind, info], default=default)


def _kind(annotation: str) -> Any:
    """Return the type of the words of a terminal for an annotation of a verb."""
    if "Sequence" in annotation or annotation == "Values":
        return list[str]
    names = annotation.split(" | ")
    kinds = {"str": str, "bool": bool, "int": int, "float": float}
    return next((kind for name, kind in kinds.items() if name in names), str)


def _run(verb: Callable[..., Any], given: dict[str, Any]) -> int:
    """Run a verb and print what it returns; return the exit status."""
    given.pop("_listed", None)
    if verb in _SLOW:
        # it imports some 300,000 objects that stay: collecting among them takes 7 % of the start
        gc.set_threshold(500_000, 20, 100)
        if sys.stdout.isatty():  # before imports of seconds; the next line covers it
            print("starting ...", end="\r", flush=True)
    token = stops_with_command.set(True)
    try:
        result = verb(**{name: v for name, v in given.items() if v is not None and v != []})
    except api.RunFailedError:
        return 1  # the command has said why
    finally:
        stops_with_command.reset(token)
    if verb in (api.plan, api.fit):
        return _print_rows(result, card=given.get("card"))
    if isinstance(result, api.Run):
        return 0
    if isinstance(result, int):
        return result
    text, status = result if isinstance(result, tuple) else (result, 0)
    typer.echo(text)
    return int(not text.is_equal) if verb is api.replay else status


def _print_rows(frame: Any, *, card: str | None) -> int:
    """Print what `plan` and `fit` return; return 1 if a precision could not be measured."""
    from raypipe.commands.table_view import terminal_width, view

    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    failed = [row.pop("failed", False) for row in rows]
    notes = []
    if card is not None:
        from raypipe.commands.prediction import conclusion, shown

        notes, rows = [conclusion(rows)], shown(rows)
    text = view(rows, terminal_width(), whole=True, how="them on a wider terminal")
    typer.echo("\n".join([text, *notes]))
    return int(any(failed))


for _verb in VERBS:
    _examples = sections(_verb)[2]
    _epilog = f"\b\nExamples:\n{_examples}" if _examples else None
    app.command(_verb.__name__, epilog=_epilog)(_command(_verb))


@app.callback()
def _common(version: Annotated[bool, _VERSION] = False) -> None:
    del version


def _spread_stages(arguments: list[str]) -> list[str]:
    """Turn ``--only A B`` into ``--only A --only B``: click's options take one value."""
    spread: list[str] = []
    further = False
    for argument, before in zip(arguments, ["", *arguments], strict=False):
        named = not argument.startswith("-") and "=" not in argument
        further = named and (before == "--only" or further)
        spread += ["--only", argument] if further and before != "--only" else [argument]
    return spread


def _interrupt(number: int, frame: object) -> None:
    del number, frame
    raise Interrupted


def _ignore_interrupts() -> None:
    """Let the interpreter exit with its status: everything is said, and another Ctrl-C is late."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """Run the command line; a configuration error is one message and exit status 2.

    SIGTERM ends a command cleanly, as Ctrl-C does.
    """
    import raypipe.launch  # noqa: F401 - first: it lets Python collect garbage less often

    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _interrupt)
    try:
        app(_spread_stages(sys.argv[1:]), prog_name="raypipe")
    except (ConfigError, UnitError) as error:
        print(f"raypipe: {without_credentials(str(error))}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # the last callback is the first to run: before Ray stops its processes, which takes seconds
        atexit.register(_ignore_interrupts)
        gc.freeze()  # the exit would collect among all objects for a second
