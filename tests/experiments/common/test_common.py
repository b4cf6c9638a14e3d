"""The parts that several experiments share."""

from __future__ import annotations

from itertools import accumulate, pairwise
from unittest.mock import MagicMock, Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from experiments.common.blocks import evenly_spread, map_blocks
from experiments.common.pretrained import model_fingerprint
from experiments.common.tables import columns
from experiments.common.tokenizer import read_tokenizer, token_lists, tokenizer_path, train_bpe
from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory
from tests.scenario import cases, write_files


@given(number=st.integers(0, 500), most=st.integers(1, 40))
def test_a_spread_sample_reaches_both_ends(number, most):
    rows = evenly_spread(range(number), most)
    assert len(rows) <= most
    assert len(rows) > min(number, most) // 2 or not number
    gaps = {after - before for before, after in pairwise(rows)}
    assert len(gaps) <= 1
    assert not number or (rows[0] == 0 and number - 1 - rows[-1] < max(gaps, default=number))


@pytest.mark.parametrize(("gpus", "on_gpus", "sizes", "device"), cases(__file__, "blocks"))
def test_blocks_cover_every_row_once_in_order_and_all_gpus_share_them(gpus, on_gpus, sizes, device):
    """The stage runs on two nodes; its calls are mapped at once."""
    card = Mock()
    card.name = "card"
    context = MagicMock(device="cpu")
    context.stage.name = "a_stage"
    context.session.nodes = [Mock(gpus=[]), Mock(gpus=[card] * gpus)]
    context.map = lambda pool, calls: ((key, call(*given)) for key, call, *given in calls)
    rows = {"train": 5, "empty": 0, "held_out": 11}
    blocks = [*map_blocks(context, rows, 4, lambda b: (range, b.start, b.end), on_gpus=on_gpus)]
    assert [len(found) for _, found in blocks] == sizes
    every = [(block.split, row) for block, found in blocks for row in found]
    assert every == [(split, row) for split, number in rows.items() for row in range(number)]
    context.begin.assert_called_once_with(16)
    assert [call.args for call in context.advance.call_args_list] == [
        (n,) for n in accumulate(sizes)
    ]
    assert str(blocks[-1][0]) == f"a_stage/held_out/{11 - sizes[-1]}"
    (options,) = context.pool.call_args.args
    assert (options.gpus, context.device) == (float(device == "card"), device)


def test_a_missing_tokenizer_is_one_message(tmp_path):
    run_dir = RunDirectory.at(tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer.json: the result of the tokenize stage is"):
        read_tokenizer(run_dir)
    run_dir.write(tokenizer_path(run_dir), "é".encode())
    assert read_tokenizer(run_dir) == "é"


def test_a_saved_model_is_identified_by_its_content(tmp_path):
    for name, weights in (("a", "1"), ("same", "1"), ("other", "2")):
        files = {"config.json": "{}", "model.safetensors": weights, "notes.md": name}
        write_files(tmp_path / name, files)
    one, same, other = (model_fingerprint(str(tmp_path / n)) for n in ("a", "same", "other"))
    assert one == same != other
    assert model_fingerprint("google-t5/t5-base") == "google-t5/t5-base"


TEXTS = ["the cat sat on the mat", "naïve café"] * 20
TRAINED, WHOLE = train_bpe(TEXTS, 300, 12), train_bpe(TEXTS, 300)


@given(st.text(min_size=1, max_size=6))
@example("[PAD]")
def test_every_text_has_tokens_that_are_the_text_again(text):
    (tokens,) = token_lists(WHOLE, [text]).to_pylist()
    assert Tokenizer.from_str(TRAINED).decode(tokens) == text
    assert 0 not in tokens
    assert max(tokens) < 300


def test_what_is_frequent_is_merged_what_is_long_is_cut_and_the_fewest_tokens_are_bytes():
    frequent, long = token_lists(TRAINED, ["the cat sat", "x" * 50]).to_pylist()
    assert len(frequent) < 6
    assert len(long) == 12
    assert train_bpe(TEXTS, 300, 12) == TRAINED
    (fewest,) = token_lists(train_bpe(TEXTS, 257), ["the café"]).to_pylist()
    assert len(fewest) == len("the café".encode())


def test_a_column_says_which_values_are_better_and_another_form_is_refused():
    (rate,) = columns(rate="real higher [rows per second]: How fast.")
    assert (rate.unit, rate.better) == ("rows per second", "higher")
    with pytest.raises(ValueError, match=r"n: expected 'type \[better\] \[unit\]: meaning'"):
        columns(n="integer")
