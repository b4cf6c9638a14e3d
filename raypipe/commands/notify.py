"""Message to a person or a program when a command of a run has ended: the setting ``notify``."""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from threading import Thread
from typing import Any
from urllib.error import URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from raypipe.errors import ConfigError
from raypipe.redaction import HIDDEN, without_secrets
from raypipe.store import run_notes
from raypipe.store.run_directory import RunDirectory

#: seconds that the end of a command waits for whoever gets the message
_PATIENCE_S = 10.0


def recipient(setting: str | Sequence[str]) -> Sequence[str]:
    """Return who gets the message: a URL as the only word, or the words of a command.

    Nobody does if a stored configuration hides it. A message never repeats it: it may be a secret.

    Raises:
        ConfigError: neither an address of HTTP nor a program that exists.

    """
    if setting == HIDDEN:
        print("WARNING: notify: *** is not an address; give it again", file=sys.stderr, flush=True)
        return ()
    if isinstance(setting, str) and setting.startswith(("http://", "https://")):
        return (setting,)
    try:
        words = shlex.split(setting) if isinstance(setting, str) else setting
    except ValueError as error:
        raise ConfigError(f"notify: cannot be split into words: {error}") from error
    if words and shutil.which(words[0]) is None:
        raise ConfigError(
            "notify: is neither an address that begins with http:// or https:// nor a command "
            "whose program exists; correct it, or leave it out"
        )
    return words


def send(
    words: Sequence[str],
    run: RunDirectory,
    fields: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """Send what became of a command as JSON, with the run's tags and note; warn if that fails."""
    try:
        notes = run_notes.read(run)
        more = {"host": platform.node(), "tags": list(notes.tags), "note": notes.note}
        content = json.dumps(without_secrets({**fields, **more})).encode()
        if words[0].startswith(("http://", "https://")):
            problem = _post(words[0], content)
        else:
            problem = _run(words, content)
    except OSError as error:
        problem = type(error).__name__
    if problem:
        say(f"WARNING: notify: the message was not delivered: {problem}")


class _NoRedirects(HTTPRedirectHandler):
    """Take a redirect as an error: its address would be asked without the message."""

    def redirect_request(self, *_: Any) -> None:
        """Return no further request."""


def _post(url: str, content: bytes) -> str:
    """Send a message to a URL; return what went wrong."""
    problems = [f"no answer within {_PATIENCE_S:g} s"]

    def work() -> None:
        try:
            request = Request(url, content, {"Content-Type": "application/json"})
            build_opener(_NoRedirects).open(request, timeout=_PATIENCE_S).close()
            problems[0] = ""
        except URLError as error:
            problems[0] = str(error)
        except (OSError, ValueError, HTTPException) as error:  # whose text may have the URL
            problems[0] = type(error).__name__

    # a timeout of the socket begins again with each byte, and there is none for names
    thread = Thread(target=work, name="notify", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return problems[0]


def _run(words: Sequence[str], content: bytes) -> str:
    """Run a command with a message on its standard input; return what went wrong."""
    silent = subprocess.DEVNULL
    try:
        done = subprocess.run(
            words, input=content, stdout=silent, stderr=silent, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the command took longer than {_PATIENCE_S:g} s and was ended"
    return f"the command ended with status {done.returncode}" if done.returncode else ""
