"""``raypipe ui``: what its pages show, who may see it, and how a browser follows a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.testclient import TestClient

import raypipe as rp
from raypipe import ui
from raypipe.commands.listing import Seen, runs
from raypipe.store import run_notes, run_status
from raypipe.store.ledger import Ledger
from raypipe.store.lock import writing
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import Column, Table, write_table
from raypipe.training.tables import STEPS
from raypipe.ui.pages import Pages
from raypipe.ui.server import application
from tests.browser import Browser, browser, in_browser
from tests.command import finish, listens, raypipe, start, until
from tests.raypipe.composed import write_status
from tests.raypipe.report.page_reader import HOSTILE, Page
from tests.scenario import cases

SCORES = Table("scores", "a score", (Column("score", "real", "It.", better="higher"),),
               axes=("method",))  # fmt: skip
SVG = r"(?s)<svg.*?</svg>"
TOKEN = "a-token-of-this-test"


def write_run(folder: Path, name: str, best: float = 0.5, **more: Any) -> RunDirectory:
    """Write a run with a table of scores, 20 steps and a failed attempt."""
    run = RunDirectory.at(folder / name)
    write_status(run, **{"result": f"scores.score {best}", **more})
    run.write(run.config, f"experiment: toy\nfit: {{rate: {best}}}\n".encode())
    rows = [{"method": "a", "score": best}, {"method": "b", "score": 0.1}]
    write_table(run, SCORES, rows, "toy-1")
    write_steps(run, 20, best)
    run.append(run.log("fit"), b"epoch 1\repoch 2\nsaid by the unit\n")
    failure = {"stage": "fit", "unit": "fit", "attempt": 1, "kind": "error", "log": "fit.log",
               "message": "ValueError: too large", "traceback": "line 7 of toy.py",
               "outcome": "gave up"}  # fmt: skip
    with writing(run, print):
        Ledger(run).put("failures", {"fit/1": failure})
    run.write(f"{run.report}/index.html", b"<title>report</title>")
    return run


def write_steps(run: RunDirectory, count: int, best: float = 0.5) -> None:
    rows = [{"trial_id": "fit", "step": n, "loss": best + 1 / n} for n in range(1, count + 1)]
    write_table(run, STEPS, rows, "toy-1", "fit")


@pytest.fixture
def folder_of_runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    first = write_run(folder, "toy/first", 0.75, hours=2)
    run_notes.change(first, "the old data", ["baseline", "paper"])
    write_run(folder, "toy/second", hours=1, experiment="other")
    return folder


@pytest.fixture
def client(folder_of_runs: Path) -> TestClient:
    return client_of(folder_of_runs)


def client_of(folder: Path, token: str = "") -> TestClient:
    return client_to(application(Pages([str(folder)]), token))


def client_to(app: Starlette, name: str = "localhost") -> TestClient:
    return TestClient(app, f"http://{name}:8270", follow_redirects=False)


def page(client: TestClient, address: str) -> Page:
    answer = client.get(address)
    assert answer.status_code == 200, answer.text
    return Page(answer.text)


def keys(client: TestClient) -> list[str]:
    """The keys of the runs, the newest first."""
    return [str(attrs["value"]) for attrs in page(client, "/").all("input") if "value" in attrs]


def test_the_table_has_the_runs_the_newest_first(client, folder_of_runs):
    table = page(client, "/")
    links = [str(attrs["href"]) for attrs in table.all("a")]
    assert links == [f"/run/{key}" for key in keys(client)]
    assert re.search(r"toy/second .*other .*succeeded .*60 min ago .*toy/first", table.words)
    assert "scores.score 0.75 baseline paper the old data" in table.words
    state = client.get("/").headers["ETag"]
    assert client.get("/", headers={"If-None-Match": state}).status_code == 304
    write_run(folder_of_runs, "third", experiment="new")
    time.sleep(1)  # the least time between two looks
    changed = client.get("/", headers={"If-None-Match": state})
    assert changed.status_code == 200
    assert "third" in changed.text


def test_the_page_of_a_run_has_its_state_failures_output_and_report(client):
    key = keys(client)[1]
    shown = page(client, f"/run/{key}")
    assert shown.headings[:4] == ["progress", "state", "failures", "output"]
    assert {"scores", "training-runs", "how-to-repeat"} <= set(shown.headings)
    words = shown.words
    for text in ("baseline paper the old data", "raypipe run toy.yaml", "scores.score 0.75",
                 "fit: error (gave up): ValueError",
                 "line 7 of toy.py", "said by the unit", "rate: 0.75", "Loss: fit"):  # fmt: skip
        assert text in words, text
    assert "epoch 1" not in words  # was written over
    report = client.get(f"/run/{key}/report")
    assert report.text == "<title>report</title>"
    assert "sandbox" in report.headers["Content-Security-Policy"]


def test_a_curve_grows_while_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("raypipe.ui.pages._SHARE", 1.0)
    run = write_run(tmp_path, "r", word="running", done=1, stages=2,
                    running=({"stage": "fit", "done": 3, "total": 9, "note": "loss 0.25"},),
                    messages=((1, "said by the command"),))  # fmt: skip
    client = client_of(tmp_path)
    with writing(run, print):
        (key,) = keys(client)
        before = page(client, f"/run/{key}")
        assert "1 of 2 stages done" in before.words
        assert "fit 3/9 loss 0.25" in before.words
        assert "said by the command" in before.words
        assert {"max": "9", "value": "3"}.items() <= before.all("progress")[0].items()
        write_steps(run, 40)
        drawn = re.findall(SVG, before.source)
        grows = "the curve grows"
        until(lambda: re.findall(SVG, client.get(f"/run/{key}").text) != drawn, grows, 10)
    after = client.get(f"/run/{key}").text
    assert "interrupted" in after


def test_the_calls_of_a_function_are_shown_as_they_end(folder):
    Path("called.py").write_text("def f(x, seed): return dict(y=x * x + seed)")
    rp.map("called:f", ["x=1..6", "seed=0..2"], run_dir="runs/calls", local=True, report=False)
    run = RunDirectory.at("runs/calls")
    for file in Path(run.path("results")).rglob("*.parquet"):
        file.unlink()  # as before the end of the first stage
    Path("called.py").unlink()
    write_status(run, word="running", experiment="called.f")
    client = client_of(folder / "runs")
    with writing(run, print):
        (key,) = keys(client)
        shown = page(client, f"/run/{key}")
    assert "18 rows, each" in shown.words
    assert "calls" in shown.headings
    assert shown.headings.index("so-far") < shown.headings.index("calls")
    assert any("y by x" in str(attrs["aria-label"]) for attrs in shown.all("svg"))


def test_a_comparison_has_tables_and_the_curves_of_all_runs(client):
    both = "&".join(f"run={key}" for key in keys(client))
    shown = page(client, f"/compare?{both}")
    assert shown.headings == ["progress", "runs", "curves", "best-setting-of-each-run", "results",
                              "environment", "configuration"]  # fmt: skip
    assert "scores.score a 0.5 0.75 (+0.25, better)" in shown.words
    assert "fit.rate 0.5 0.75" in shown.words
    svg = shown.source[shown.source.index("<svg") :]
    assert "run= 1" in svg.replace("=", "= ").replace("=  ", "= ")
    assert client.get(f"/compare?run={keys(client)[0]}").status_code == 404
    assert client.get(f"/compare?{both}&run=x").status_code == 404


def test_a_damaged_run_shows_what_can_be_read(client, folder_of_runs):
    run = RunDirectory.at(folder_of_runs / "toy/second")
    run.write(run.partition("scores"), b"PAR1")
    shown = page(client, f"/run/{keys(client)[0]}")
    assert "is damaged" in shown.words
    assert "said by the unit" in shown.words


def test_a_status_that_lacks_fields_of_a_stage_does_not_hide_the_other_runs(tmp_path):
    write_run(tmp_path, "whole")
    write_run(tmp_path, "partial", word="failed", running=({}, {"stage": "a"}, {"total": 2}))
    client = client_of(tmp_path)
    assert len(keys(client)) == 2
    for key in keys(client):
        page(client, f"/run/{key}")
    assert "partial" in raypipe("ls", str(tmp_path))


# who may see it


def test_no_text_of_a_run_becomes_markup(tmp_path):
    texts = ("experiment", "command", "message", "result", "left", "use")
    running = ({"stage": HOSTILE, "done": 1, "total": 2, "note": HOSTILE},)
    run = write_run(tmp_path, f"{HOSTILE.replace('/', '')}", word="failed", running=running,
                    messages=((1, HOSTILE),), **dict.fromkeys(texts, HOSTILE))  # fmt: skip
    other = write_run(tmp_path, "other")
    for each in (run, other):
        run_notes.change(each, HOSTILE, [HOSTILE])
        table = Table(HOSTILE.replace("/", ""), "a row", (), open=True, axes=(HOSTILE,))
        write_table(each, table, [{HOSTILE: HOSTILE, "x": n} for n in range(3)], HOSTILE)
        each.append(each.log(HOSTILE), HOSTILE.encode())
        hostile = dict.fromkeys(("stage", "unit", "kind", "message", "traceback", "log"), HOSTILE)
        with writing(each, print):
            Ledger(each).put("failures", {"x": {**hostile, "outcome": HOSTILE, "attempt": 1}})
        each.write(each.notes, json.dumps({"note": HOSTILE, "tags": [HOSTILE]}).encode())
    client = client_of(tmp_path)
    both = keys(client)
    for address in ("/", *(f"/run/{key}" for key in both), f"/compare?run={'&run='.join(both)}"):
        shown = page(client, address)
        assert HOSTILE.replace("/", "") in "".join(shown.text) or HOSTILE in "".join(shown.text)
        assert len(shown.scripts) == 1
        assert not any(name.startswith("on") for _, attrs in shown.tags for name in attrs)
        links = [str(attrs["href"]) for attrs in shown.all("a")]
        assert all(re.fullmatch(r"(#|/)[\w%./-]*", link) for link in links)


def test_the_script_takes_no_section_for_an_element_of_its_own():
    script = (Path(ui.__file__).parent / "templates/live.js").read_text()
    own = r"(runs|filter|count|lost|period)"
    assert not re.findall(rf"""(?:ById|Selector)\(["']#?{own}["']""", script)
    assert len(set(re.findall(r"\b(?:table|input|span|b)#(\w+)", script))) == 5


@pytest.mark.parametrize(("method", "address", "headers", "status"), cases(__file__, "refused"))
def test_what_is_refused(client, folder_of_runs, tmp_path, method, address, headers, status):
    (tmp_path / "outside.html").write_text("outside")
    report = folder_of_runs / "toy/second/report"
    (report / "index.html").unlink()
    (report / "index.html").symlink_to(tmp_path / "outside.html")
    (report / "secret.txt").write_text("not of the report")
    answer = client.request(method, address.format(key=keys(client)[0]), headers=headers)
    assert answer.status_code == status
    assert "outside" not in answer.text
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def test_a_log_that_is_a_link_is_not_shown(client, folder_of_runs, tmp_path):
    (tmp_path / "outside.log").write_text("outside of the run")
    (folder_of_runs / "toy/second/logs/x.log").symlink_to(tmp_path / "outside.log")
    assert "outside of the run" not in client.get(f"/run/{keys(client)[0]}").text


@pytest.mark.parametrize("name", ["status.json", "notes.json", "config.yaml", ".lock"])
def test_a_run_whose_file_is_a_pipe_holds_up_no_other(client, folder_of_runs, name):
    run = folder_of_runs / "toy/second"
    write_status(RunDirectory.at(run), word="running")
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for key in keys(client):
        page(client, f"/run/{key}")
    assert "toy/first" in client.get("/").text


def test_a_link_to_a_folder_is_not_followed(client, folder_of_runs):
    run = folder_of_runs / "toy/second"
    for folder in ("logs", "report", "results", "ledger"):
        for name in ("again", "and-again"):  # more paths than can be visited
            (run / folder / name).symlink_to(".")
    (run / "report/etc").symlink_to("/etc")
    shutil.rmtree(folder_of_runs / "toy/first/logs")
    (folder_of_runs / "toy/first/logs").symlink_to("/")
    for key in keys(client):
        start_s = time.monotonic()
        assert client.get(f"/run/{key}").status_code == 200
        assert time.monotonic() - start_s < 5


def test_beyond_this_machine_every_request_needs_the_token(folder_of_runs):
    client = client_of(folder_of_runs, TOKEN)
    for address in ("/", "/run/x", "/compare", "/?token=wrong", "/?token="):
        assert client.get(address).status_code == 403, address
    answer = client.get(f"/compare?token={TOKEN}&run=x", headers={"Host": "node7:8270"})
    assert answer.status_code == 303
    assert answer.headers["Location"] == "/compare?run=x"
    assert TOKEN not in answer.headers["Location"]
    assert "httponly" in answer.headers["Set-Cookie"].lower()
    client.cookies.clear()
    cookie = answer.headers["Set-Cookie"].partition(";")[0]
    assert client.get("/", headers={"Cookie": cookie, "Host": "node7:8270"}).status_code == 200
    assert client.get("/", headers={"Cookie": f"{cookie}x"}).status_code == 403
    evil = client.get(f"http://node7//evil.example?token={TOKEN}")
    assert evil.headers["Location"].startswith("/evil.example")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.0.0.2", "[::1]"])
def test_the_address_of_the_printed_link_is_answered(folder_of_runs, name):
    app = application(Pages([str(folder_of_runs)]), "", name)
    assert client_to(app, name).get("/").status_code == 200
    assert client_to(app, "evil.example").get("/").status_code == 400


def test_a_port_that_is_in_use_is_named(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port}: " in raypipe("ui", ".", "--port", port, expected=2)


def test_without_the_extra_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "raypipe.ui.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'raypipe-runner[ui]'" in raypipe("ui", ".", expected=2)


# many runs


def test_a_run_that_has_ended_is_read_once(folder_of_runs, monkeypatch):
    read, count = run_status.read, list[str]()
    monkeypatch.setattr(run_status, "read", lambda run: count.append(run.shown) or read(run))
    location, seen = str(folder_of_runs), Seen()
    assert len(runs(location, seen)) == 2
    assert len(count) == 2
    runs(location, seen)
    assert len(count) == 2
    write_status(RunDirectory.at(folder_of_runs / "toy/first"), word="failed")
    found = runs(location, seen)
    assert [each.status for each in found] == ["failed", "succeeded"]
    assert len(count) == 3
    shutil.rmtree(found[0].run.location)
    assert len(runs(location, seen)) == len(seen) == 1


@pytest.mark.slow
def test_a_thousand_runs_take_less_than_a_second(tmp_path):
    for number in range(1000):
        run = RunDirectory.at(tmp_path / f"e{number % 7}/{number:04}")
        write_status(run, hours=number, result="scores.score 0.5 (method=a)")
    client = client_of(tmp_path)
    for _ in range(2):
        start_s = time.process_time()
        assert len(client.get("/").text) > 300_000
        assert time.process_time() - start_s < 1
        time.sleep(1.1)


# in a browser


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the runs in a folder from a thread; yield the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = application(Pages([str(folder)]), "")
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@in_browser
@pytest.mark.slow
def test_a_browser_filters_sorts_follows_and_compares(chromium, folder_of_runs):
    shown = "document.querySelectorAll('#runs tbody tr:not([hidden]) a')"
    rows = f"[...{shown}].map(a => a.textContent)"
    with served(folder_of_runs) as address:
        chromium.open(address)
        assert [name[-6:] for name in chromium.value(rows)] == ["second", "/first"]
        chromium.value("document.querySelector('#runs th').click()")
        assert [name[-6:] for name in chromium.value(rows)] == ["/first", "second"]
        chromium.value("document.querySelector('input[name=run]').click()")
        chromium.value("filter.value = 'FIRST toy'; filter.dispatchEvent(new Event('input'))")
        assert len(chromium.value(rows)) == 1
        assert chromium.value("document.getElementById('count').textContent") == "1 of 2 runs"
        live = write_run(folder_of_runs, "toy/first-again", word="running", done=0, stages=1,
                         running=({"stage": "fit", "done": 1, "total": 9},))  # fmt: skip
        live.append(live.log("fit"), b"line\n" * 300)
        with writing(live, print):
            chromium.until(f"{rows}.length == 2")  # sorted and filtered as before
            assert [name[-6:] for name in chromium.value(rows)] == ["/first", "-again"]
            assert chromium.value("document.querySelector('input[name=run]').checked")
            chromium.value(f"{shown}[1].click()")
            chromium.until("document.querySelector('progress')?.value == 1")
            chromium.until("document.querySelectorAll('#training-runs svg').length > 0")
            chromium.value("document.querySelector('#output details').open = true")
            chromium.until("document.querySelector('#output details pre').scrollTop > 1000")
            drawn = "document.querySelector('#training-runs svg').innerHTML.length"
            before = chromium.value(drawn)
            write_steps(live, 60)
            write_status(live, word="running", done=0, stages=1,
                         running=({"stage": "fit", "done": 5, "total": 9},))  # fmt: skip
            live.append(live.log("fit"), b"a new line\n")
            chromium.until("document.querySelector('progress').value == 5")
            chromium.until("document.querySelector('#output').textContent.includes('a new line')")
            assert chromium.value("document.querySelector('#output details').open")
            assert chromium.value("document.querySelector('#output details pre').scrollTop > 1000")
            chromium.until(f"{drawn} != {before}")
        chromium.until("document.querySelector('.title').textContent.includes('interrupted')")
        write_status(live, word="succeeded")
        chromium.until("document.querySelector('.title').textContent.includes('succeeded')", 60)
        chromium.open(address)
        chromium.value("document.querySelectorAll('input[name=run]').forEach(box => box.click())")
        chromium.value("document.querySelector('button').click()")
        chromium.until("document.querySelector('h1')?.textContent == 'Comparison'")
        chromium.until("document.querySelectorAll('#curves svg').length == 1")
        chromium.value("look()")  # the section of runs is no table of runs
        chromium.until("state != ''")
        period = Table("period", "a row", (), open=True, axes=("method",))
        write_table(live, period, [{"method": "a", "x": 1.0}], "toy-1")
        chromium.open(f"{address}/run/{keys(client_of(folder_of_runs))[0]}")
        chromium.until("document.querySelector('section#period') != null")
        chromium.value(
            "const ask = fetch; window.count = 0; fetch = (...all) => (count++, ask(...all))"
        )
        chromium.value("look()")
        time.sleep(1)
        assert chromium.value("window.count") == 1
    chromium.until("!document.getElementById('lost').hidden")
    assert [text for text in chromium.complaints if "ERR_CONNECTION_REFUSED" not in text] == []


@in_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1400])
def test_no_page_is_wider_than_the_screen(chromium, folder_of_runs, width):
    chromium.resize(width)
    with served(folder_of_runs) as address:
        chromium.open(address)
        links = chromium.value("[...document.querySelectorAll('#runs a')].map(a => a.href)")
        both = "&".join(f"run={link.rpartition('/')[2]}" for link in links)
        for page_address in (address, links[0], f"{address}/compare?{both}"):
            chromium.open(page_address)
            assert chromium.value("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_the_command_listens_on_this_machine_alone_and_ends_with_ctrl_c(folder_of_runs):
    process = start(folder_of_runs, "ui", ".", "--port", "0", environment={})
    assert process.stdout is not None
    line = process.stdout.readline()
    port = int(re.findall(r"http://127\.0\.0\.1:(\d+)/ \(2 runs; Ctrl-C ends it\)", line)[0])
    assert listens("127.0.0.1", port)
    urlopen(f"http://127.0.0.1:{port}/").close()  # it answers, so Ctrl-C finds it at work
    outside = socket.gethostbyname(socket.gethostname())
    assert outside.startswith("127.") or not listens(outside, port)
    process.send_signal(signal.SIGINT)
    assert finish(process, 130, 30) == ""


@pytest.mark.slow
def test_a_run_has_a_page_that_ends_soon_after_it(folder):
    Path("called.py").write_text("import time\ndef f(x): time.sleep(x); return dict(y=x)")
    words = ("map", "called:f", "x=[0,60]", "--local", "--ui", "--run-dir", "runs/calls")
    process = start(folder, *words, environment={})
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("page: "))
    link, port = re.findall(r"(http://127\.0\.0\.1:(\d+)/run/\w+) ", line)[0]
    with urlopen(link) as answer:  # also before the server is ready
        assert "running" in answer.read().decode()
    next(line for line in process.stdout if line.startswith("calls: started"))
    process.kill()
    process.wait()
    with urlopen(link) as answer:
        assert "interrupted" in answer.read().decode()
    until(lambda: not listens("127.0.0.1", int(port)), "the page ends", 60)
    assert "--ui" not in (folder / "runs/calls/status.json").read_text()


def test_a_page_without_its_packages_is_refused_before_the_run(folder, monkeypatch):
    Path("called.py").write_text("def f(x): return dict(y=x)")
    monkeypatch.setattr("raypipe.ui.address.find_spec", lambda _: None)
    with pytest.raises(rp.ConfigError, match=r"--ui: needs Starlette .* 'raypipe-runner\[ui\]'"):
        rp.map("called:f", ["x=1"], local=True, ui=True)
    assert not list(folder.glob("runs/*"))
