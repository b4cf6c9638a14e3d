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
            request = Request(words[0], content, {"Content-Type": "application/json"})
            build_opener(_NoRedirects).open(request, timeout=_PATIENCE_S).close()
        else:
            subprocess.run(
                words,
                input=content,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_PATIENCE_S,
                check=True,
            )
    except URLError as error:
        say(f"WARNING: notify: the message was not delivered: {error}")
    except (OSError, ValueError, HTTPException, subprocess.SubprocessError) as error:
        # its text may have the URL or the command
        status = f" {error.returncode}" if isinstance(error, subprocess.CalledProcessError) else ""
        say(f"WARNING: notify: the message was not delivered: {type(error).__name__}{status}")


class _NoRedirects(HTTPRedirectHandler):
    """Take a redirect as an error: its address would be asked without the message."""

    def redirect_request(self, *_: Any) -> None:
        """Return no further request."""
