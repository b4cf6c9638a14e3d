"""What docs/security.md promises."""

from __future__ import annotations

import ast
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

import raypipe as rp
from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.load import load_corpus
from raypipe.commands import run as commands
from raypipe.config.validation import hidden_override
from raypipe.errors import ConfigError, UnitError
from raypipe.launch.inline import InlineLauncher
from raypipe.redaction import is_secret, printable, redacted, without_credentials, without_secrets
from raypipe.store import tables as results
from raypipe.store.run_directory import RunDirectory
from tests.command import Ended, in_process, raypipe
from tests.raypipe.toy import TOY

PROJECT = Path(__file__).resolve().parents[2]
MODULES = sorted(
    file for folder in ("raypipe", "experiments") for file in (PROJECT / folder).rglob("*.py")
)
SECRET = "S3cr3tS3cr3t"
CASES = yaml.load(
    Path(__file__).with_name("secrets.yaml").read_text().replace("{SECRET}", SECRET),
    yaml.CSafeLoader,
)


# nothing is unpickled


def test_no_module_can_unpickle_a_file() -> None:
    """Ray hands jobs from process to process as pickles: that is the launchers' business."""
    roots = {"pickle", "_pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}
    users = set()
    for file in MODULES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", ""), *(alias.name for alias in node.names)]
                if roots & {part for name in names for part in str(name).split(".")}:
                    users.add(file.relative_to(PROJECT).parent.as_posix())
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            given = {word.arg or "**": ast.unparse(word.value) for word in node.keywords}
            if name.endswith("torch.load"):
                assert given.get("weights_only") == "True", file
            if name in ("np.load", "numpy.load"):
                assert given.get("allow_pickle", "False") == "False", file
            if name.startswith("yaml.") and "load" in name:
                assert (name, given) == ("yaml.load", {"Loader": "_Loader"}), file
            assert not name.endswith(("read_pickle", "to_pickle", "os.system")), file
            assert name not in ("eval", "exec"), file
            assert given.get("shell", "False") == "False", file
    assert users == {"raypipe/launch"}


class Payload:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self):
        return Path.touch, (self._marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that a payload makes when it is unpickled."""
    path = tmp_path / "marker"
    pickle.loads(pickle.dumps(Payload(path)))
    assert path.exists()
    path.unlink()
    yield path
    assert not path.exists(), "it was unpickled"


def test_weights_and_tables_with_a_payload_do_not_run_it(run: RunDirectory, marker: Path) -> None:
    from raypipe.training.weights import read_weights

    payload = pickle.dumps(Payload(marker))
    for path in (run.model("t"), run.partition("trials")):
        run.write(path, payload)
    with pytest.raises(ConfigError, match="missing or damaged"):
        read_weights(run, run.model("t"))
    with pytest.raises(ConfigError, match="is damaged"):
        results.read_table(run, "trials")


@pytest.mark.parametrize(("place", "module"), [("out", "evil"), (".", "out.evil"), (".", "out")])
def test_a_report_imports_no_module_of_the_run_directory(
    work: Path, monkeypatch: pytest.MonkeyPatch, place: str, module: str
) -> None:
    run = RunDirectory.at(work / "out")
    run.write(run.config, f"experiment: {module}\n".encode())
    run.write(run.status, b"{}")
    run.write(f"{run.table('stages')}/x", b"")
    for name in ("evil.py", "__init__.py"):
        (work / "out" / name).write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(place)
    told = raypipe("report", run.location, expected=2)
    assert f"experiment = {module}: would be imported from the run directory" in told


# paths


@pytest.mark.parametrize("name", ["..", ".", "", "a\0b", "a\nb", "...", "x/../../y"])
def test_no_name_leads_out_of_a_run_directory(run: RunDirectory, name: str) -> None:
    for place in (run.checkpoints, run.model, run.partition, run.table, run.artifact):
        with suppress(ConfigError):
            inside = Path(place(name)).resolve().relative_to(run.location)
            assert len(inside.parts) >= 2
    with pytest.raises(ConfigError):
        run.artifact("stage", "..", "..", "..", "x")
    with pytest.raises(ConfigError):
        run.path("../x")


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "..", "a\0b", "a\nb", "x" * 5000])
@pytest.mark.parametrize("source", ["bow", "text", "csv"])
def test_a_corpus_is_a_name_and_no_path(tmp_path: Path, source: str, name: str) -> None:
    (tmp_path / "data" / "X_..").mkdir(parents=True)
    (tmp_path / "x.txt").write_text("apple apple\n")
    (tmp_path / "x.csv").write_text("text\napple apple\n")
    with pytest.raises((CorpusError, OSError)):
        load_corpus(
            source, name, tmp_path / "data", **({"column": "text"} if source == "csv" else {})
        )


# secrets

LOGIN = """
class Login(Settings):
    api_key: str = "none"
    url: str = ""
    token: int = 1


class Toy(Settings):
    login: Login = Login()
"""


def assert_nowhere(folder: Path, *told: str) -> None:
    """No file of a folder and no text has the secret."""
    contents = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    assert len(contents) > 5
    for content in (*(text.encode() for text in told), *contents):
        assert SECRET.encode() not in content


@pytest.fixture
def signed_in(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment that has secrets among its settings; more are in the environment."""
    (work / "toy.py").write_text(TOY.replace("class Toy(Settings):\n", LOGIN.lstrip("\n")))
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    return work


def ended(*words: str) -> Ended:
    return in_process(InlineLauncher(), *words, environment={})


def test_no_secret_is_in_any_file_or_on_the_terminal(
    signed_in: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    toy, output = signed_in / "toy.py", ""
    error = f'OSError("no answer from https://me:{SECRET}@host, /x?token={SECRET}")'
    toy.write_text(toy.read_text().replace('RuntimeError("seven is one too many")', error))
    url = f"https://me:{SECRET}@host/x"
    keys = (f"login.api_key={SECRET}", f"login.url={url}", "login.token=5")
    section = (f"login={{api_key: {SECRET}, url: '{url}', token: 5}}",)
    for login, numbers, status in ((keys, "2", 0), (keys, "8", 130), (section, "7", 1)):
        given = (*login, f"squares.numbers=[1, {numbers}]", "--run-dir", "out")
        output += raypipe("run", "toy.yaml", *given, expected=status)
    output += raypipe("report", "out")
    assert "login.api_key=***" in output
    assert "login=***" in output
    assert "failed: squares: OSError: no answer from https://***@host, /x?token=***\n" in output
    assert "no answer from" in (signed_in / "out/logs/squares.log").read_text()
    assert_nowhere(signed_in / "out", output, *capfd.readouterr(), caplog.text)
    kept = (signed_in / "out" / "config.yaml").read_text()
    assert "api_key: '***'" in kept
    assert "url: https://***@host/x" in kept
    assert "token: 5" in kept
    assert os.environ["HF_TOKEN"] == SECRET


def test_no_secret_of_a_failed_unit_is_on_the_terminal(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = f"no answer from https://me:{SECRET}@host"

    def failing(*given: object) -> None:
        raise UnitError("fit/8", "error", why)

    monkeypatch.setattr(commands, "fit", failing)
    told = raypipe("fit", "toy.yaml", expected=1)
    assert told == "raypipe: fit/8: error: no answer from https://***@host\n"
    row = {"stage": "fit", "failed": True, "note": why}
    monkeypatch.setattr(commands, "fit", lambda *given: [row])
    told = raypipe("fit", "toy.yaml", expected=1)
    assert "no answer from https://***@host" in told
    assert SECRET not in told


def test_no_secret_is_in_a_stream_however_it_is_cut() -> None:
    text = f"get https://me:{SECRET}@host/x\t?token={SECRET}&a=b\n'{SECRET[:2]}\xff".encode(
        "latin-1"
    )
    for size in (1, 3, 1000):
        *written, rest = redacted(text[at : at + size] for at in range(0, len(text), size))
        assert b"".join(written).endswith(b"a=b\n'")  # a word that may go on is held back
        assert b"".join(written) + rest == b"get https://***@host/x\t?token=***&a=b\n'S3\xff"


def test_a_word_of_any_length_is_redacted_and_passed_on() -> None:
    """Quadratic searches would take hours here."""
    assert without_credentials("://:," * 10**6) == "://:," * 10**6
    assert next(redacted([b"x" * 10**6])) == b"x" * 10**6


def test_a_text_to_print_does_not_act_on_a_terminal() -> None:
    text = "\x1b[1;31mred\x1b[0m\tb\x1b]0;title\x07c\x1b(Bd\x1b7e\x9b5m\x00\u202e\r\n\x1b"
    assert printable(text, keep="\n\t") == "red\tbcde 5m   \n"
    assert printable(text) == "red bcde 5m    "


@pytest.mark.parametrize("override", CASES["overrides"])
def test_no_secret_is_in_a_message(signed_in, override: str) -> None:
    found = ended("plan", "toy.yaml", override)
    assert found.status == 2
    assert found.errors.startswith("raypipe: ")
    assert SECRET not in found.output


def test_what_is_hidden() -> None:
    given, hidden = CASES["values"]
    assert without_secrets(given) == hidden
    assert {given: hidden_override(given) for given, _ in CASES["shown"]} == dict(CASES["shown"])
    assert all(map(is_secret, ("access-token", "hf-token", "api-key", "login.Secret-Key")))
    assert not any(map(is_secret, ("tokenizer", "max-tokens", "credential_kind", "key")))


@pytest.mark.parametrize(("given", "shown"), CASES["queries"])
def test_secrets_in_the_query_of_a_uri_are_hidden(given: str, shown: str) -> None:
    assert without_credentials(given) == shown
    assert RunDirectory.at(given).shown.endswith(shown) or "://" not in given


@pytest.mark.parametrize("given", CASES["arguments"], ids=str)
@pytest.mark.parametrize("key", ["arguments", "matrix.axes"])
def test_a_secret_that_would_name_results_is_refused(work, key, given) -> None:
    (work / "sec.py").write_text("def f(**given): return {'y': 1}\n")
    words = [f"{name}={json.dumps(value)}" for name, value in given.items()]
    if key == "matrix.axes":
        words = [f"matrix.arguments.{n}={json.dumps([v])}" for n, v in given.items()]
    found = ended("map", "sec:f", *words, "--local", "--run-dir", "out")
    assert found.status == 2
    assert "os.environ[" in found.errors
    assert SECRET not in found.output
    assert not (work / "out").exists()


def test_a_secret_that_a_function_returns_is_not_stored(work) -> None:
    (work / "sec2.py").write_text(
        f"def f(token): return {{'api_key': '{SECRET}', 'place': 's3://k:{SECRET}@b/x'}}\n"
    )
    told = raypipe("map", "sec2:f", "token=0..2", "--local", "--run-dir", "out")
    assert_nowhere(work / "out", told)
    row = rp.open(work / "out").table("calls").iloc[0]
    assert (row["token"], row["api_key"], row["place"]) == (0, "***", "s3://***@b/x")
