"""N-grams of a run's tokens: probabilities of tokens, stored in one stage and read in another."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray

from experiments.common.blocks import SPLITS, Split
from experiments.lm_pretrain.dataset import validation_tokens
from experiments.lm_pretrain.kneser_ney import kneser_ney
from experiments.lm_pretrain.shards import run_folder, tokens_between
from raypipe.store.run_directory import RunDirectory

#: tokens at the end of the training text that are counted, and at the start of the held-out text
#: that are predicted
_COUNTED, _PREDICTED = 2**24, 2**23


def store_token_ngrams(run_dir: RunDirectory, validation_share: float) -> None:
    """Task: store the log-probabilities of the held-out tokens and of the validation part's tokens.

    The n-grams of the held-out text are counted in the whole training text. For the validation
    part, at its start, they are counted in the rest of it.
    """
    folder = run_folder(run_dir)
    index = folder.index()
    train, held_out = (folder.maps(split) for split in SPLITS)
    total, validation = index.tokens["train"], validation_tokens(folder, validation_share)
    seen = tokens_between(train, max(0, total - _COUNTED), total)
    test = tokens_between(held_out, 0, min(index.tokens["held_out"], _PREDICTED))
    _write(run_dir, "held_out", kneser_ney(seen, test, index.vocabulary))
    if 0 < validation < total:
        seen = tokens_between(train, max(validation, total - _COUNTED), total)
        test = tokens_between(train, 0, validation)
        _write(run_dir, "train", kneser_ney(seen, test, index.vocabulary))


def token_log_probabilities(
    run_dir: RunDirectory, split: Split, start: int, end: int
) -> NDArray[np.float64]:
    """Return the stored log-probabilities of the tokens ``[start, end)`` of a split, in nats.

    NaN where there are none: after the validation part, and at the end of a long held-out text.
    """
    found: NDArray[np.float32] = np.load(io.BytesIO(run_dir.read(_path(run_dir, split))))
    values = np.full(end - start, np.nan)
    known = found[start:end]
    values[: len(known)] = known
    return values


def _write(run_dir: RunDirectory, split: Split, probabilities: NDArray[np.float64]) -> None:
    content = io.BytesIO()
    np.save(content, np.log(probabilities).astype(np.float32))
    run_dir.write(_path(run_dir, split), content.getvalue())


def _path(run_dir: RunDirectory, split: Split) -> str:
    return run_dir.artifact("baselines", f"{split}.npy")
