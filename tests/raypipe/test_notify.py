"""The message when a command has ended: to a server, to a command, and what goes wrong."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from raypipe.commands import notify
from raypipe.graph.tracking import flat
from raypipe.store.run_directory import RunDirectory
from tests.command import raypipe

SECRET = "S3cr3tS3cr3t"


class Receiver(ThreadingHTTPServer):
    """A server on this machine: the messages that it got, and the status of its answers.

    Without one it closes the connection; a negative one is an answer that never ends.
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
        if answer < 0:  # a byte now and then, so that no wait for a byte is long
            while not self.server.over.wait(0.02):
                self.wfile.write(b"H")
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


def test_a_server_that_is_down_changes_nothing_but_a_warning(work) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"notify=http://127.0.0.1:{taken.getsockname()[1]}/"
    shown = raypipe("run", "toy.yaml", url, "--run-dir", "out")
    assert shown.count("WARNING") == 1
    assert "WARNING: notify: the message was not delivered: <urlopen error" in shown
    assert json.loads(Path("out/status.json").read_bytes())["status"] == "succeeded"


@pytest.mark.parametrize("setting", ["tee told.json", "[tee, told.json]", "sh -c 'tee told.json'"])
def test_a_command_gets_the_message(work, setting: str) -> None:
    shown = raypipe("run", "toy.yaml", f"notify={setting}", "--run-dir", "out")
    told = json.loads(Path("told.json").read_bytes())
    assert (told["status"], told["tags"], told["note"]) == ("succeeded", [], "")
    assert "WARNING" not in shown
    assert "run_dir" not in shown  # what the command prints


@pytest.fixture
def send(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    monkeypatch.setattr(notify, "_PATIENCE_S", 0.2)

    def sent(setting: str) -> list[str]:
        said: list[str] = []
        notify.send(notify.recipient(setting), run, {"status": "failed"}, said.append)
        return said

    return sent


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (404, "HTTP Error 404: Not Found"),
        (302, "HTTP Error 302: Found"),
        (None, "RemoteDisconnected"),
        (-1, "no answer within 0.2 s"),
    ],
)
def test_what_a_server_answers(server, send, answer: int | None, problem: str) -> None:
    server.answer = answer
    assert send(server.url) == [f"WARNING: notify: the message was not delivered: {problem}"]
    assert server.got[0]["status"] == "failed"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("sleep 60", "the command took longer than 0.2 s and was ended"),
        ("sh -c 'exit 3'", "the command ended with status 3"),
        (f"http://127.0.0.1:{SECRET}/x", "InvalidURL"),
        (f"http://[{SECRET}/x", "ValueError"),
    ],
)
def test_what_goes_wrong_with_a_command_or_an_address(send, setting: str, problem: str) -> None:
    assert send(setting) == [f"WARNING: notify: the message was not delivered: {problem}"]


@pytest.mark.parametrize("setting", ["ftp://h/x", "no_such_program x", "tee 'x"])
def test_what_can_get_no_message_is_refused_and_not_repeated(work, setting: str) -> None:
    told = raypipe("run", "toy.yaml", f'notify="{setting}"', "--run-dir", "out", expected=2)
    assert told.startswith("raypipe: notify: ")
    assert setting not in told
    assert not Path("out").exists()
