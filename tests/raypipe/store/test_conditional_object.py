"""Conditional writes: the store decides which of several writers succeeds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

import pytest
from pyarrow import fs as arrow_fs

from raypipe.errors import ConfigError
from raypipe.store.lock import ConditionalObject, ConflictError
from raypipe.store.run_directory import RunDirectory

SECRET = "wJalrXUtn/FEMI+x"
QUOTED = "wJalrXUtn%2FFEMI%2Bx"


def opened(location: str) -> ConditionalObject:
    run = RunDirectory.at(location)
    return ConditionalObject.at(run, run.lock)


class Gcs(BaseHTTPRequestHandler):
    """As much of the XML interface of Google's storage as an object with a generation needs."""

    objects: dict[str, tuple[bytes, int]] = {}  # noqa: RUF012 - emptied by the fixture

    def do_GET(self) -> None:
        if self.path in self.objects:
            self._answer(200, *self.objects[self.path])
        else:
            self._answer(404, b"", 0)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        generation = self.objects.get(self.path, (b"", 0))[1]
        if self.headers["x-goog-if-generation-match"] not in (None, str(generation)):
            self._answer(412, b"", 0)
            return
        self.objects[self.path] = content, generation + 1
        self._answer(200, b"", generation + 1, of=content)

    def _answer(
        self, status: int, content: bytes, generation: int, of: bytes | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 07:20:07 GMT")
        self.send_header("ETag", hashlib.md5(of or content).hexdigest())
        self.send_header("x-goog-generation", str(generation))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def gcs() -> Iterator[str]:
    """The ``host:port`` of a server of Google's interface."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Gcs) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        Gcs.objects.clear()


@pytest.mark.parametrize(
    ("options", "endpoint"),
    [
        ("region=eu-west-1", None),
        ("region=eu-west-1&endpoint_override=store:9000", "https://store:9000"),
        ("region=eu-west-1&endpoint_override=store:9000&scheme=http", "http://store:9000"),
        ("region=eu-west-1&endpoint_override=http://store:9000", "http://store:9000"),
    ],
)
def test_options_and_credentials_of_an_s3_uri(monkeypatch, options, endpoint):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "another")
    subject = opened(f"s3://key:{QUOTED}@bucket/some/run?{options}")
    store = subject.store
    assert subject.key == "some/run/.lock"
    assert store.config["bucket"] == "bucket"
    assert store.config["region"] == "eu-west-1"
    assert store.config.get("endpoint") == endpoint
    assert store.credential_provider() == {
        "access_key_id": "key",
        "secret_access_key": SECRET,
        "token": None,
        "expires_at": None,
    }
    assert SECRET not in repr(subject) + repr(store.config)


def test_credentials_of_a_profile_are_found_by_boto3(monkeypatch, tmp_path):
    profile = "[some]\naws_access_key_id = key\naws_secret_access_key = secret\n"
    (tmp_path / "credentials").write_text(profile)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "some")
    found = opened("s3://bucket/run?region=eu-west-1").store.credential_provider()
    assert (found["access_key_id"], found["secret_access_key"]) == ("key", "secret")


@pytest.mark.parametrize("kind", ["mock", "abfs", "hdfs"])
def test_storage_without_conditional_writes_is_refused(kind):
    run = RunDirectory(f"{kind}://key:{QUOTED}@store/run")
    run.__dict__["_opened"] = (arrow_fs._MockFileSystem(), "store/run")
    with pytest.raises(ConfigError, match=rf"{kind}://\*\*\*@store/run: two commands cannot"):
        ConditionalObject.at(run, run.lock)


def test_an_object_is_replaced_only_at_the_version_seen(server, gcs):
    options = f"endpoint_override={server}&scheme=http&region=us-east-1"
    in_s3 = RunDirectory.at(f"s3://key:any@runs/a%20b%2523/%C3%BC+/run?{options}")
    in_gcs = RunDirectory.at(f"gs://anonymous@runs/run?endpoint_override={gcs}&scheme=http")
    for run in (in_s3, in_gcs):
        subject = ConditionalObject.at(run, run.lock)
        assert subject.read() == (b"", None)
        first = subject.write(b"1", None)
        assert subject.read() == (b"1", first)
        second = subject.write(b"2", first)
        for outdated in (None, first):
            with pytest.raises(ConflictError):
                subject.write(b"3", outdated)
        assert subject.read() == (b"2", second)
    assert [unquote(path) for path in Gcs.objects] == ["/runs/run/.lock"]
    assert in_s3.read(in_s3.lock) == b"2"  # as pyarrow sees it
    in_s3.delete(in_s3.lock)
    with pytest.raises(ConflictError):
        ConditionalObject.at(in_s3, in_s3.lock).write(b"3", second)


@pytest.mark.parametrize("is_there", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_error_of_the_store_is_one_line_without_credentials(server, is_there):
    options = f"endpoint_override={server if is_there else '127.0.0.1:1'}&scheme=http"
    subject = opened(f"s3://key:{QUOTED}@nothing-here/run?{options}&region=us-east-1")
    with pytest.raises(OSError, match=r"nothing-here/run/\.lock") as caught:
        subject.write(b"1", None)
    assert not [part for part in ("\n", "<", SECRET, QUOTED) if part in str(caught.value)]
    assert caught.value.__cause__ is None
