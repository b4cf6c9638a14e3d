"""The message when a command has ended: to a server, to a command, and what goes wrong."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from raypipe.commands import notify
from raypipe.graph.tracking import flat
from tests.command import raypipe
from tests.scenario import cases

SECRET = "S3cr3tS3cr3t"


class Receiver(ThreadingHTTPServer):
    """A server on this machine: the messages that it got, and the status of its answers.

    Without one it closes the connection; a negative one is none at all.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[dict[str, Any]] = []
        self.answer: int | None = 204
        self.url = f"http://127.0.0.1:{self.server_port}/hook/{SECRET}"
        self.over = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        self.server.got.append(json.loads(content))
        answer = self.server.answer
        if answer is None:
            return
        if answer < 0:
            self.server.over.wait()
            return
        self.send_response(answer)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def do_GET(self) -> None:
        raise AssertionError("a redirect was followed without the message")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, args=(0.01,))
        thread.start()
        yield receiver
        receiver.over.set()
        receiver.shutdown()
        thread.join()


def test_a_server_is_told_how_each_command_ended(work, server, capfd, caplog) -> None:
    words = ("run", "toy.yaml", f"notify={server.url}", "--run-dir", "out")
    output = raypipe(*words, "--tag", "base", "--note", "old tokenizer")
    done = server.got[0]
    assert done.pop("duration_s") >= 0
    assert done == {
        "run_dir": str(work / "out"),
        "experiment": "toy",
        "status": "succeeded",
        "message": "",
        "result": done["result"],
        "command": f"raypipe run toy.yaml 'notify=***' --run-dir {work}/out",
        "host": socket.gethostname(),
        "tags": ["base"],
        "note": "old tokenizer",
    }
    output += raypipe(*words)
    output += raypipe(*words, "squares.numbrs=[1]", expected=2)
    output += raypipe("replay", "out")
    assert len(server.got) == 1
    output += raypipe(*words, "squares.numbers=[1, 7]", expected=1)
    output += raypipe(*words, "squares.numbers=[1, 8]", expected=130)
    ends = [(each["status"], each["message"]) for each in server.got[1:]]
    assert ends[0][0] == "failed"
    assert "seven is one too many" in ends[0][1]
    assert ends[1] == ("interrupted", "interrupted")

    kept = (work / "out/config.yaml").read_text()
    assert "notify: '***'" in kept
    hidden = raypipe("run", "out/config.yaml", "squares.numbers=[1, 4]", "--run-dir", "out")
    assert "notify: *** is not an address; give it again" in hidden
    assert len(server.got) == 3
    texts = [output, hidden, caplog.text, *capfd.readouterr()]
    files = [file.read_bytes() for file in (work / "out").rglob("*") if file.is_file()]
    assert not [each for each in (*files, *(t.encode() for t in texts)) if SECRET.encode() in each]
    assert flat({"notify": ["curl", server.url]}) == {"notify": "***"}


@pytest.mark.parametrize(("answer", "setting", "problem"), cases(__file__, "notify"))
def test_what_goes_wrong_is_a_warning(work, server, monkeypatch, answer, setting, problem) -> None:
    monkeypatch.setattr(notify, "_PATIENCE_S", 0.2)
    server.answer = answer
    notified = f"notify={setting.format(url=server.url, SECRET=SECRET)}"
    shown = raypipe("run", "toy.yaml", notified, "--run-dir", "out")
    assert re.findall("WARNING.*", shown) == [
        f"WARNING: notify: the message was not delivered: {problem}"
    ]
    assert [each["status"] for each in server.got] == ["succeeded"] * (setting == "{url}")
