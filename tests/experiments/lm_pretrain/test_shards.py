from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.common.blocks import SPLITS
from experiments.lm_pretrain import shards
from experiments.lm_pretrain.shards import (
    TOKENIZER,
    DamagedError,
    Index,
    ShardWriter,
    TokenFolder,
)
from experiments.lm_pretrain.training import PackedTokens
from raypipe.store.run_directory import RunDirectory

#: of both splits; the shards have 7 tokens
STREAMS = {"train": np.arange(100, 140, dtype=np.uint32), "held_out": np.arange(14)}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD", 7)


def stored(
    location: Path, dtype: str = "<u2", parts: int = 3, streams: dict[str, np.ndarray] = STREAMS
) -> TokenFolder:
    run = RunDirectory.at(location)
    folder = TokenFolder(run, run.path("tokens"))
    folder.write(TOKENIZER, b"")
    checksums = {TOKENIZER: sha256(b"").hexdigest()}
    for split in SPLITS:
        writer = ShardWriter(folder, split, dtype)
        for part in np.array_split(streams[split], parts):
            writer.add(part)
        writer.close()
        assert writer.tokens == len(streams[split])
        checksums |= writer.sha256
    sizes = {split: len(streams[split]) for split in SPLITS}
    folder.write_index(Index("bytes", 257, dtype, shards.SHARD, sizes, sizes, checksums))
    return folder


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("parts", [1, 3, 25])
def test_shards_read_back_however_they_came(tmp_path, short, dtype, parts):
    folder = stored(tmp_path, dtype, parts)
    for split, expected in STREAMS.items():
        maps = folder.maps(split)
        assert {len(each) for each in maps[:-1]} == {7}
        assert all(isinstance(each, np.memmap) and each.dtype == dtype for each in maps)
        assert np.concatenate(maps).tolist() == expected.tolist()
    folder.check()


@pytest.mark.parametrize("context", [1, 3, 5, 7, 13, 39])
def test_packed_samples_cover_the_stream(tmp_path, short, context):
    samples = PackedTokens(stored(tmp_path), "train", context)
    assert len(samples) == 39 // context
    stream = STREAMS["train"].tolist()
    for number in range(len(samples)):
        sample = samples[number]
        assert sample.dtype == torch.int64
        assert sample.tolist() == stream[number * context : (number + 1) * context + 1]
    predicted = [token for number in range(len(samples)) for token in samples[number][1:].tolist()]
    assert predicted == stream[1 : 1 + len(samples) * context]
    for outside in (-1, len(samples)):
        with pytest.raises(IndexError, match=f"of {len(samples)}"):
            samples[outside]


@pytest.mark.parametrize("first", [0, 1, 9, 35, 36, 40])
def test_samples_begin_after_the_validation_part(tmp_path, short, first):
    part = PackedTokens(stored(tmp_path), "train", 4, first)
    stream = STREAMS["train"].tolist()[first:]
    assert len(part) == max(0, len(stream) - 1) // 4
    for number in range(len(part)):
        assert part[number].tolist() == stream[number * 4 : number * 4 + 5]
    copied = pickle.loads(pickle.dumps(part))
    assert len(copied) == len(part)
    assert all(torch.equal(copied[number], part[number]) for number in range(len(part)))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def change_count(path: Path) -> None:
    index = json.loads(path.read_text())
    index["tokens"]["train"] = 41
    path.write_text(json.dumps(index))


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
def test_damage_is_noticed(tmp_path, short, name: str, damage: Callable[[Path], None]):
    folder = stored(tmp_path / "run")
    damage(Path(folder.folder) / name)
    other = RunDirectory.at(tmp_path / "other")
    for use in (folder.check, lambda: folder.copy_to(TokenFolder(other, other.path()))):
        with pytest.raises(DamagedError, match=rf"{name}: the tokens are missing or damaged"):
            use()
    # without an index the copied files are not a folder of tokens
    assert not other.exists(other.path("tokens.json"))


@pytest.mark.parametrize(
    ("name", "damage"), [("train-00001.bin", truncate), ("tokens.json", change_count)]
)
def test_another_length_is_noticed_when_it_is_mapped(tmp_path, short, name, damage):
    folder = stored(tmp_path)
    damage(Path(folder.folder) / name)
    with pytest.raises(DamagedError, match=r"tokens instead of"):
        folder.maps("train")
