"""Whole runs in a bucket of a real S3 server, of this machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from pyarrow import fs as arrow_fs
from starlette.testclient import TestClient

import raypipe as rp
from raypipe.commands import run as commands
from raypipe.launch.inline import InlineLauncher
from raypipe.store import lock
from raypipe.store.run_directory import RunDirectory
from raypipe.ui.pages import Pages
from raypipe.ui.server import application
from tests.command import Ended, in_process, raypipe
from tests.raypipe.store.conftest import FAST, uri_of
from tests.raypipe.toy import TOY
from tests.scenario import cases, named_cases, play

SECRET = "wJalrXUtnFEMI"


@pytest.fixture
def uri(server, work, request, monkeypatch) -> str:
    """A run directory in the bucket, the credentials in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(commands, "writing", partial(lock.writing, pace=FAST))
    return uri_of(server, re.sub(r"\W", "-", request.node.name), user="")


@pytest.mark.parametrize("case", named_cases(__file__, "bucket"))
def test_commands_on_a_bucket(work, uri, case):
    place, _, query = uri.partition("?")
    names = {name: f"{place}/{name}?{query}" for name in ("one", "two")}
    play(case["commands"], at=names["one"], uri=uri, **names)
    run = RunDirectory.at(names["one"])
    assert run.read(run.lock) == b""  # released
    for file in ("config.yaml", "report/index.html"):
        assert len(run.read(run.path(*file.split("/")))) > 30


def test_files_of_calls_are_copied_to_the_bucket(work, uri):
    (work / "own.py").write_text(cases(__file__, "uris")["writer"])
    words = ("map", "own:write", "x=[1,2,3]", "--run-dir", uri)
    assert "ValueError: three" in raypipe(*words, expected=1)
    files = rp.open(uri).files("*.txt")
    named = [(file.call, file.name) for file in files]
    assert named == [("x=1", "a b/note.txt"), ("x=2", "a b/note.txt")]
    assert files[1].path == uri.replace("?", "/files/calls/x=2/a b/note.txt?")
    assert files[1].open().read() == b"note of 2"
    run = RunDirectory.at(uri)
    assert run.list(run.path("files", "calls")) == ["x=1", "x=2"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("toy", "squares.power: stored 3, now 2"),
        pytest.param("toy2", "run.experiment: stored 'toy2'", marks=pytest.mark.slow),
    ],
)
def test_what_another_command_stored_while_this_one_waited_is_not_altered(
    work, uri, monkeypatch, name, message
):
    (work / "toy2.py").write_text(TOY.replace('"toy"', '"toy2"'))
    (work / "other.yaml").write_text(f"experiment: {name}\nsquares: {{power: 3}}\n")
    run, real = RunDirectory.at(uri), commands.writing

    @contextmanager
    def writing(run: RunDirectory, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
        monkeypatch.setattr(commands, "writing", real)
        raypipe("run", "other.yaml", "--run-dir", uri)
        with real(run, say) as check:
            yield check

    monkeypatch.setattr(commands, "writing", writing)
    assert message in raypipe("run", "toy.yaml", "--run-dir", uri, expected=2)
    assert b"power: 3" in run.read(run.config)
    assert "nothing to do" in raypipe("run", "other.yaml", "--run-dir", uri)


@pytest.mark.parametrize(
    "numbers",
    ["[1,7]", *(pytest.param(each, marks=pytest.mark.slow) for each in ("[1,8]", "[1,2]"))],
)
def test_a_secret_in_the_uri_is_nowhere(work, server, uri, capfd, caplog, numbers):
    location = uri_of(server, f"secret{len(numbers)}{numbers[3]}", f"key:{SECRET}@")

    def ended(*words: str) -> Ended:
        return in_process(InlineLauncher(), *words, environment={})

    command = ("run", "toy.yaml", f"squares.numbers={numbers}", "--run-dir", location)
    found = [ended(*command), ended(*command), ended(*command, "squares.power=3")]
    with lock.writing(RunDirectory.at(location), print, FAST):
        found.append(ended(*command, "squares.numbers=[1,2,3,4]"))
    found += [ended("results", location, "no_such_table"), ended("report", location)]
    assert [each.status for each in found[1:]] == [0, 2, 2, 2, 0]
    shown = "".join(each.output for each in found)
    assert "s3://***@runs/" in shown
    assert SECRET not in "".join([shown, *capfd.readouterr(), caplog.text])
    run = RunDirectory.at(location)
    everything = arrow_fs.FileSelector(run.path(), recursive=True)
    files = [info.path for info in run.fs.get_file_info(everything) if info.is_file]
    assert len(files) > 5
    assert not [path for path in files if SECRET.encode() in run.read(path)]
    local = [path for path in work.rglob("*") if path.is_file()]
    assert not [path for path in local if SECRET.encode() in path.read_bytes()]
    assert SECRET not in repr(run)


NOWHERE = "s3://key:{secret}@runs/x?endpoint_override=127.0.0.1:1&scheme=http"


@pytest.mark.parametrize(
    ("location", "message"),
    [
        *cases(__file__, "uris")["refused"],
        pytest.param(NOWHERE, "cannot be", marks=pytest.mark.slow),
    ],
)
def test_a_location_that_does_not_work_is_one_message(work, server, uri, location, message):
    given = location.format(secret=SECRET, server=server)
    ended = in_process(InlineLauncher(), "run", "toy.yaml", "--run-dir", given, environment={})
    assert ended.status == 2
    assert message in ended.errors
    assert "Traceback" not in ended.errors
    assert SECRET not in ended.output


@pytest.mark.slow
def test_the_local_page_shows_runs_in_a_bucket(work, server, uri):
    given = uri_of(server, "local-page", user=f"key:{SECRET}@")
    place, _, query = given.partition("?")
    raypipe("run", "toy.yaml", "--run-dir", f"{place}/one?{query}")
    client = TestClient(application(Pages([given]), ""), "http://localhost")
    table = client.get("/").text
    (key,) = re.findall(r'href="/run/(\w+)"', table)
    page = client.get(f"/run/{key}").text
    assert "succeeded" in page
    assert "squares/2" in page
    assert client.get(f"/run/{key}/report").status_code == 200
    assert client.get(f"/run/{key}/report/../config.yaml").status_code == 404
    assert SECRET not in table + page
