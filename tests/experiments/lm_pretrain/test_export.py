"""The library ``transformers`` reads the export, and computes the same."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

import raypipe as rp
from experiments.lm_pretrain.evaluation import load_model
from experiments.lm_pretrain.model import LanguageModel, LmSettings
from experiments.lm_pretrain.shards import run_folder
from experiments.lm_pretrain.tokenizer import END_OF_TEXT
from experiments.lm_pretrain.training import model_of
from raypipe.commands import cluster
from raypipe.commands import configuration as config
from raypipe.errors import ConfigError
from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from tests.command import status

transformers = pytest.importorskip("transformers", reason="needs the extra nlp")

PLAIN = str(Path(__file__).resolve().parents[3] / "configs/lm_pretrain.yaml")
TEXTS = ["The line  ends\n\there. ", "a café, a 'façade'; <|endoftext|> is text, the end\n"] * 20
LLAMA = {"norm": "rms", "positions": "rotary", "mlp": "swiglu"}
GPT2 = {"norm": "layer", "positions": "learned", "mlp": "gelu"}


def same_logits(folder: str, model: LanguageModel, architecture: str) -> None:
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert type(loaded).__name__ == architecture
    assert loaded.dtype == torch.float32
    assert not any(report.values()), report
    s = model.settings
    tokens = torch.randint(s.vocabulary, (2, s.context), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, found = model(tokens), loaded.eval()(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    ours, theirs = (sum(p.numel() for p in m.parameters()) for m in (model, loaded))
    biases = sum(p.numel() for name, p in loaded.named_parameters() if name.endswith(".bias"))
    assert ours == theirs - biases


COMBINED = [
    dict(zip(LLAMA, parts, strict=True))
    for parts in itertools.product(("rms", "layer"), ("rotary", "learned"), ("swiglu", "gelu"))
]


@pytest.mark.parametrize("parts", [p for p in COMBINED if p not in (LLAMA, GPT2)])
def test_parts_of_no_architecture_are_refused_before_anything_starts(
    parts: dict[str, str],
) -> None:
    given = [f"model.{key}={value}" for key, value in parts.items()]
    config.resolve(config.read(PLAIN), given, "cpu", [])
    named = "model.norm = {norm}, model.positions = {positions} and model.mlp = {mlp} are"
    with pytest.raises(ConfigError) as error:
        config.resolve(config.read(PLAIN), [*given, "export=true"], "cpu", [])
    message = str(error.value)
    assert named.format(**parts) in message
    assert "LlamaForCausalLM" in message
    assert "GPT2LMHeadModel" in message


def test_random_tokens_are_not_exported() -> None:
    given = ["data.source=random", "export=true"]
    with pytest.raises(ConfigError, match=r"data\.source = random: there is no tokenizer"):
        config.resolve(config.read(PLAIN), given, "cpu", [])


@pytest.mark.parametrize(
    ("overrides", "architecture"),
    [
        ([], "LlamaForCausalLM"),
        (
            ["model.norm=layer", "model.positions=learned", "model.mlp=gelu", "model.tied=true",
             "data.tokens=characters"],
            "GPT2LMHeadModel",
        ),
        (["data.tokens=bytes", "model.rope_base=500", "model.tied=true"], "LlamaForCausalLM"),
    ],
)  # fmt: skip
def test_a_finished_run_is_exported_when_it_is_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    architecture: str,
) -> None:
    monkeypatch.setattr(cluster, "start", lambda *_: InlineLauncher())
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("".join(TEXTS), encoding="utf-8")
    given = [
        *["data.source=text", f"data.files=[{tmp_path / 'text.txt'}]", "model.vocabulary=280"],
        *["model.width=16", "model.heads=2", "model.layers=1", "model.feed_forward=16"],
        *["model.context=16", "train.training.steps=20", "train.training.learning_rate=0.02"],
        *overrides,
    ]
    run = RunDirectory.at(tmp_path / "run")

    def command(*more: str) -> int:
        return status(rp.run, PLAIN, [*given, *more], run_dir=run.location, profile="cpu")

    assert command() == 0
    folder = Path(run.artifact("export", "hf"))
    assert not folder.exists()
    assert command("export=true") == 0
    settings: LmSettings = config.resolve(config.read(PLAIN), given, "cpu", []).settings.model
    settings = model_of(run_folder(run), settings)
    same_logits(str(folder), load_model(run, settings), architecture)
    tokenizer = run_folder(run).tokenizer()
    loaded = transformers.AutoTokenizer.from_pretrained(str(folder))
    for text in (*TEXTS[:2], "the  <|endoftext|>", " a", "", "\n\n"):
        assert loaded(text)["input_ids"] == tokenizer.encode(text).tolist()
        assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.eos_token_id, loaded.bos_token_id) == (END_OF_TEXT, END_OF_TEXT)
    assert (len(loaded), loaded.model_max_length) == (tokenizer.vocabulary, 16)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == settings.vocabulary
