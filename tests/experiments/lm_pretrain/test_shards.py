from __future__ import annotations

import pickle
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.common.blocks import SPLITS
from experiments.lm_pretrain import shards
from experiments.lm_pretrain.shards import TOKENIZER, DamagedError, Index, ShardWriter, TokenFolder
from experiments.lm_pretrain.training import PackedTokens
from raypipe.store.run_directory import RunDirectory

#: of both splits; the shards have 7 tokens
STREAMS = {"train": np.arange(100, 140, dtype=np.uint32), "held_out": np.arange(14)}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD", 7)


def stored(location: Path, dtype: str = "<u2") -> TokenFolder:
    run = RunDirectory.at(location)
    folder = TokenFolder(run, run.path("tokens"))
    folder.write(TOKENIZER, b"")
    checksums = {TOKENIZER: sha256(b"").hexdigest()}
    for split in SPLITS:
        writer = ShardWriter(folder, split, dtype)
        for part in np.array_split(STREAMS[split], 3):
            writer.add(part)
        writer.close()
        assert writer.tokens == len(STREAMS[split])
        checksums |= writer.sha256
    sizes = {split: len(STREAMS[split]) for split in SPLITS}
    folder.write_index(Index("bytes", 257, dtype, shards.SHARD, sizes, sizes, checksums))
    return folder


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize(
    ("context", "first"), [(1, 0), (3, 1), (5, 9), (7, 0), (13, 35), (39, 0), (4, 36), (4, 40)]
)
def test_packed_samples_cover_the_stream_after_the_validation_part(
    tmp_path, short, dtype, context, first
):
    packed = PackedTokens(stored(tmp_path, dtype), "train", context, first)
    samples = pickle.loads(pickle.dumps(packed))
    stream = STREAMS["train"].tolist()[first:]
    assert len(samples) == max(0, len(stream) - 1) // context
    for number in range(len(samples)):
        sample = samples[number]
        assert sample.dtype == torch.int64
        assert sample.tolist() == stream[number * context : (number + 1) * context + 1]
    for outside in (-1, len(samples)):
        with pytest.raises(IndexError, match=f"of {len(samples)}"):
            samples[outside]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train-00002.bin", flip),
        ("train-00002.bin", truncate),
        ("held_out-00000.bin", Path.unlink),
        ("tokens.json", Path.unlink),
        ("tokens.json", truncate),
        ("tokenizer.json", Path.unlink),
    ],
)
def test_damage_is_noticed(tmp_path, short, name, damage):
    folder = stored(tmp_path / "run")
    damage(Path(folder.folder) / name)
    other = RunDirectory.at(tmp_path / "other")
    for use in (folder.check, lambda: folder.copy_to(TokenFolder(other, other.path()))):
        with pytest.raises(DamagedError, match=rf"{name}: the tokens are missing or damaged"):
            use()
    # without an index the copied files are not a folder of tokens
    assert not other.exists(other.path("tokens.json"))
