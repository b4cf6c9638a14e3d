"""Progress in a notebook: one output of the cell that is updated in place."""

from __future__ import annotations

import html
import io
import sys
import threading
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType

#: characters of a line
WIDTH = 100
_PERIOD_S = 1.0


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


class NotebookView:
    """Output below a cell that shows what ``rendered`` returns, every second until it stops."""

    def __init__(self, rendered: Callable[[], RenderableType]) -> None:
        self._rendered = rendered
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._update, name="notebook", daemon=True)
        self._handle: Any = None

    def start(self) -> None:
        """Add the output to the cell that runs."""
        from IPython.display import display

        self._handle = display(self._content(), display_id=True)
        self._thread.start()

    def stop(self) -> None:
        """Empty the output."""
        self._stopped.set()
        self._thread.join()
        self._handle.update(_preformatted(""))

    def _update(self) -> None:
        while not self._stopped.wait(_PERIOD_S):
            self._handle.update(self._content())

    def _content(self) -> Any:
        text = io.StringIO()
        Console(file=text, width=WIDTH, force_jupyter=False).print(self._rendered())
        return _preformatted(text.getvalue())


def _preformatted(text: str) -> Any:
    from IPython.display import HTML

    return HTML(f"<pre>{html.escape(text)}</pre>" if text.strip() else "")
