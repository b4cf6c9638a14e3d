"""The library ``transformers`` reads the export, and computes the same."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

import raypipe as rp
from experiments.common.blocks import SPLITS
from experiments.lm_pretrain import shards
from experiments.lm_pretrain.evaluation import load_model
from experiments.lm_pretrain.export import export
from experiments.lm_pretrain.model import LanguageModel, LmSettings
from experiments.lm_pretrain.shards import Index, ShardWriter, run_folder
from experiments.lm_pretrain.tokenizer import END_OF_TEXT, TextTokenizer, make_tokenizer
from raypipe.commands import cluster
from raypipe.commands import configuration as config
from raypipe.errors import ConfigError
from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.training.weights import write_weights
from tests.command import status

transformers = pytest.importorskip("transformers", reason="needs the extra nlp")

PLAIN = str(Path(__file__).resolve().parents[3] / "configs/lm_pretrain.yaml")
SMALL = LmSettings(vocabulary=300, width=24, heads=3, layers=2, feed_forward=20, context=12)
TEXTS = ["The line  ends\n\there. ", "a café, a 'façade'; <|endoftext|> is text, the end\n"] * 20
LLAMA = {"norm": "rms", "positions": "rotary", "mlp": "swiglu"}
GPT2 = {"norm": "layer", "positions": "learned", "mlp": "gelu"}
TOKENIZERS = {kind: make_tokenizer(kind, TEXTS, 290) for kind in ("bpe", "characters", "bytes")}
KNOWN = "".join(sorted(set().union(*TEXTS)))


def stored(run: RunDirectory, settings: LmSettings, tokenizer: TextTokenizer) -> LanguageModel:
    """A model whose every weight shows in the logits, and the tokenizer, in a run directory."""
    torch.manual_seed(0)
    model = LanguageModel(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    write_weights(run, run.model("train"), model.state_dict(), {})
    folder, sizes = run_folder(run), {"train": 1, "held_out": 1}
    for split in SPLITS:
        writer = ShardWriter(folder, split, "<u2")
        writer.add(tokenizer.encode("a"))
        writer.close()
    folder.write(shards.TOKENIZER, tokenizer.content.encode())
    folder.write_index(Index(tokenizer.kind, tokenizer.vocabulary, "<u2", 8, sizes, sizes, {}))
    return model


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


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("parts", "architecture"),
    [
        (LLAMA, "LlamaForCausalLM"),
        (LLAMA | {"rope_base": 500.0}, "LlamaForCausalLM"),
        (GPT2, "GPT2LMHeadModel"),
    ],
)
def test_the_logits_are_equal(
    tmp_path: Path, parts: dict[str, object], architecture: str, tied: bool
) -> None:
    settings = LmSettings.model_validate(SMALL.model_dump() | parts | {"tied": tied})
    run = RunDirectory.at(tmp_path)
    model = stored(run, settings, TOKENIZERS["bytes"])
    export(run, settings, str(tmp_path / "hf"))
    same_logits(str(tmp_path / "hf"), model, architecture)


@pytest.mark.parametrize("kind", ["bpe", "characters", "bytes"])
@pytest.mark.parametrize("parts", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_the_tokens_are_equal(tmp_path: Path, kind: str, parts: dict[str, object]) -> None:
    tokenizer, run = TOKENIZERS[kind], RunDirectory.at(tmp_path)
    settings = LmSettings.model_validate(SMALL.model_dump() | parts)
    stored(run, settings, tokenizer)
    export(run, settings, str(tmp_path / "hf"))
    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
    for text in (*TEXTS[:2], "the  <|endoftext|>", " a", "", "\n\n"):
        assert loaded(text)["input_ids"] == tokenizer.encode(text).tolist()
        assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.eos_token_id, loaded.bos_token_id) == (END_OF_TEXT, END_OF_TEXT)
    assert len(loaded) == tokenizer.vocabulary
    assert loaded.model_max_length == SMALL.context


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
    index = run_folder(run).index()
    if index.kind == "characters":
        settings = settings.model_copy(update={"vocabulary": index.vocabulary})
    same_logits(str(folder), load_model(run, settings), architecture)
    tokenizer = run_folder(run).tokenizer()
    loaded = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert loaded(TEXTS[1])["input_ids"] == tokenizer.encode(TEXTS[1]).tolist()
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == settings.vocabulary
