"""Tokenizer, a BPE trained here or a pretrained model's, and the stage that encodes the splits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from experiments.common.blocks import PARTS, Block, Part, evenly_spread, map_blocks
from experiments.common.tokenizer import FEWEST_TOKENS as _FEWEST
from experiments.common.tokenizer import load_tokenizer, read_tokenizer, store_tokenizer, train_bpe
from experiments.summarization.data import load
from raypipe import ConfigError, RunDirectory, StageContext, artifacts

#: special tokens of the BPE: padding, which also begins a summary, and the end of a text
SPECIAL = ("<pad>", "</s>")
#: the id of the end; every T5 has the same two ids
END = 1
#: the 256 bytes and the special tokens
FEWEST_TOKENS = _FEWEST - 1 + len(SPECIAL)


@dataclass(frozen=True)
class SubwordTokenizer:
    """A tokenizer as JSON of the library ``tokenizers``; cheap to pickle."""

    content: str

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without special tokens and without its end."""
        tokenizer = load_tokenizer(self.content)
        encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[token for token in each.ids if token > END] for each in encoded]

    def decode(self, ids: Iterable[Sequence[int]]) -> list[str]:
        """Return the text of each list of tokens, without surrounding white space."""
        texts = load_tokenizer(self.content).decode_batch([list(each) for each in ids])
        return [text.strip() for text in texts]


def make_tokenizer(texts: Sequence[str], vocabulary: int, pretrained: str | None) -> str:
    """Return the JSON of a BPE with at most ``vocabulary`` tokens, or of a pretrained tokenizer."""
    if pretrained is None:
        return train_bpe(texts, vocabulary, special=SPECIAL)
    from experiments.summarization.pretrained import tokenizer_content

    tokenizer = Tokenizer.from_str(tokenizer_content(pretrained))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    content: str = tokenizer.to_str()
    return content


class Lengths(NamedTuple):
    """Maximum numbers of tokens, including the end."""

    source: int
    target: int


class Encoded(NamedTuple):
    """Encoded documents, and the numbers of documents and summaries that were cut.

    ``pairs`` has a row per summary (``source``, ``target``); ``documents`` has a row per document
    (``source``, ``text``, ``references``).
    """

    pairs: pa.Table
    documents: pa.Table
    cut_sources: int
    cut_targets: int


def encode_pairs(
    tokenizer: SubwordTokenizer,
    prefix: str,
    lengths: Lengths,
    documents: Sequence[str],
    summaries: Sequence[Sequence[str]],
) -> Encoded:
    """Return the tokens of pairs; each text ends with :data:`END`, and long ones are cut."""
    sources = tokenizer.encode([prefix + text for text in documents])
    references = [len(each) for each in summaries]
    targets = tokenizer.encode([text for each in summaries for text in each])
    ids = pa.list_(pa.int32())
    source = pa.array([_ended(tokens, lengths.source) for tokens in sources], ids)
    pairs = {
        "source": source.take(pa.array(np.repeat(np.arange(len(documents)), references))),
        "target": pa.array([_ended(tokens, lengths.target) for tokens in targets], ids),
    }
    texts = {
        "source": source,
        "text": pa.array(documents, pa.large_string()),
        "references": pa.array(summaries, pa.list_(pa.large_string())),
    }
    return Encoded(
        pa.table(pairs),
        pa.table(texts),
        sum(len(tokens) >= lengths.source for tokens in sources),
        sum(len(tokens) >= lengths.target for tokens in targets),
    )


def _ended(ids: list[int], length: int) -> list[int]:
    return [*ids[: length - 1], END]


#: documents per task
_BLOCK = 256
#: documents that the tokenizer is trained on at most, with their summaries
_TRAINED_ON = 50_000


def pairs_path(run_dir: RunDirectory, split: Part) -> str:
    """Return the path of a split: ``source`` and ``target``, a row per summary."""
    return run_dir.artifact("tokenize", f"{split}.arrow")


def documents_path(run_dir: RunDirectory) -> str:
    """Return the path of the held-out documents: ``source``, ``text`` and ``references``."""
    return run_dir.artifact("tokenize", "documents.arrow")


def tokenizer_of(run_dir: RunDirectory) -> SubwordTokenizer:
    """Return the tokenizer of a run. Raises ConfigError if it is missing."""
    return SubwordTokenizer(read_tokenizer(run_dir))


def read_documents(run_dir: RunDirectory) -> pa.Table:
    """Return a run's held-out documents. Raises ConfigError if they are missing or damaged."""
    path = documents_path(run_dir)
    try:
        return artifacts.read_arrow(run_dir, path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: a stage's result is missing or damaged ({error}); run the configuration in "
            "another run directory"
        ) from error


def run_tokenize(context: StageContext) -> None:
    """Make the tokenizer, encode the splits block by block, and store them."""
    settings, run_dir = context.settings.data, context.run_dir
    lengths = Lengths(settings.source_length, settings.target_length)
    data = load(settings)
    for note in data.notes:
        context.say(note)
    rows = evenly_spread(range(len(data.train)), _TRAINED_ON)
    texts = [data.train.documents[row] for row in rows]
    texts += [text for row in rows for text in data.train.summaries[row]]
    model = context.settings.model
    content = store_tokenizer(context, make_tokenizer, texts, model.vocabulary, model.pretrained)
    splits = {split: pairs for split in PARTS if len(pairs := getattr(data, split))}

    def call(block: Block[Part]) -> tuple[Any, ...]:
        pairs, part = splits[block.split], slice(block.start, block.end)
        tokenizer = SubwordTokenizer(content)
        texts = pairs.documents[part], pairs.summaries[part]
        return encode_pairs, tokenizer, settings.prefix, lengths, *texts

    blocks: dict[Part, list[Encoded]] = {split: [] for split in splits}
    sizes = {split: len(pairs) for split, pairs in splits.items()}
    for block, encoded in map_blocks(context, sizes, _BLOCK, call):
        blocks[block.split].append(encoded)
    for split, parts in blocks.items():
        pairs = pa.concat_tables(part.pairs for part in parts).combine_chunks()
        artifacts.write_arrow(run_dir, pairs_path(run_dir, split), pairs)
        sources = sum(part.cut_sources for part in parts)
        targets = sum(part.cut_targets for part in parts)
        context.say(
            f"{split}: {sizes[split]} documents, of which {sources} are cut at {lengths.source} "
            f"tokens, and {len(pairs)} summaries, of which {targets} are cut at {lengths.target}"
        )
    documents = pa.concat_tables(part.documents for part in blocks["held_out"]).combine_chunks()
    artifacts.write_arrow(run_dir, documents_path(run_dir), documents)
