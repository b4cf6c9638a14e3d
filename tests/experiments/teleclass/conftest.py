"""A stage's context without Ray, and run directories on both kinds of file systems."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pyarrow import fs as arrow_fs

from raypipe.context import Session, StageContext
from raypipe.experiment import Stage, Unit
from raypipe.launch.inline import InlineLauncher
from raypipe.ledger import Ledger
from raypipe.paths import RunDirectory
from raypipe.progress import Display
from raypipe.tracking import Target, Trackers


@pytest.fixture(params=["local", "remote"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    """A run directory, also on a file system that is not local, as object storage is."""
    if request.param == "local":
        return RunDirectory.at(tmp_path / "run")
    run = RunDirectory("bucket://run")
    filesystem = arrow_fs.SubTreeFileSystem(str(tmp_path), arrow_fs.LocalFileSystem())
    run.__dict__["_opened"] = (filesystem, "remote")
    return run


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    """The context of a stage in this process."""
    run = RunDirectory.at(tmp_path / "run")
    trackers = Trackers((), Target(run, "r", "teleclass", {}))
    session = Session(run, "r", Ledger(run), InlineLauncher(), Display(), [], trackers)
    return StageContext(Stage("stage", lambda context: None, [Unit("stage", {})]), session)


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a BERT of random weights with its tokenizer."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=600,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
    )
    transformers.BertModel(config).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(97 + i) for i in range(26))]
    transformers.BertTokenizerFast(
        vocab={word: i for i, word in enumerate(words)}, model_max_length=40
    ).save_pretrained(folder)
    return str(folder)
