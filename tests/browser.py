"""A real browser without a window, which tests steer through its DevTools protocol."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.command import until

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), "")
#: a test that needs a browser
in_browser = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")


class Browser:
    """A page of a browser: it opens addresses and evaluates JavaScript."""

    def __init__(self, socket: str, send: Callable[[Any], Any]) -> None:
        self._socket, self._run = socket, send
        self._session: aiohttp.ClientSession | None = None
        self._connection: aiohttp.ClientWebSocketResponse | None = None
        self._number = 0
        #: errors of scripts, and what the policy of a page has refused
        self.complaints: list[str] = []

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        found: dict[str, Any] = self._run(self._send(method, parameters))
        return found

    async def _send(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        if self._connection is None:
            self._session = aiohttp.ClientSession()
            self._connection = await self._session.ws_connect(self._socket, max_msg_size=0)
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        await self._connection.send_json(message)
        while True:
            answer = await self._connection.receive_json(timeout=60)
            if answer.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(answer["params"]["exceptionDetails"]))
            if answer.get("method") == "Log.entryAdded":
                self.complaints.append(answer["params"]["entry"]["text"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the connection to it."""
        if self._session is not None:
            self._run(self._session.close())

    def open(self, address: str) -> None:
        """Open an address and wait until it is loaded."""
        self("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, within_s: float = 30.0) -> None:
        """Wait until a JavaScript expression is true."""
        until(lambda: self.value(expression), expression, within_s)

    def resize(self, width: int) -> None:
        """Give the page a width in pixels."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, mobile=False,
             deviceScaleFactor=1)  # fmt: skip


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with its profile in a folder."""
    process = subprocess.Popen(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    loop = asyncio.new_event_loop()
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "DevTools listening" in line)
        port = re.findall(r"ws://127\.0\.0\.1:(\d+)/", line)[0]
        threading.Thread(target=process.stderr.read, daemon=True).start()

        async def pages() -> Any:
            address = f"http://127.0.0.1:{port}/json"
            async with aiohttp.ClientSession() as session, session.get(address) as answer:
                return await answer.json(content_type=None)

        (page,) = (page for page in loop.run_until_complete(pages()) if page["type"] == "page")
        found = Browser(page["webSocketDebuggerUrl"], loop.run_until_complete)
        for name in ("Page", "Runtime", "Log"):
            found(f"{name}.enable")
        yield found
        found.close()
    finally:
        process.terminate()
        process.wait(30)
        loop.close()
