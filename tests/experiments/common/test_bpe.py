from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from experiments.common.tokenizer import FEWEST_TOKENS, token_lists, train_bpe

TEXTS = ["the cat sat on the mat", "naïve café"] * 20
TRAINED = train_bpe(TEXTS, 300, 12)


@given(st.text(min_size=1, max_size=6))
@example("[PAD]")
def test_every_text_has_tokens_that_are_the_text_again(text: str) -> None:
    (tokens,) = token_lists(train_bpe(TEXTS, 300, 100), [text]).to_pylist()
    assert Tokenizer.from_str(TRAINED).decode(tokens) == text
    assert 0 not in tokens
    assert max(tokens) < 300


def test_what_is_frequent_is_merged_and_what_is_long_is_cut() -> None:
    frequent, long = token_lists(TRAINED, ["the cat sat", "x" * 50]).to_pylist()
    assert len(frequent) < 6
    assert len(long) == 12
    assert train_bpe(TEXTS, 300, 12) == TRAINED


def test_the_fewest_tokens_are_bytes() -> None:
    (tokens,) = token_lists(train_bpe(TEXTS, FEWEST_TOKENS, 99), ["the café"]).to_pylist()
    assert len(tokens) == len("the café".encode())


def test_special_tokens_come_first_and_are_no_text() -> None:
    content = train_bpe(TEXTS, 300, special=("<pad>", "</s>"))
    (tokens,) = token_lists(content, ["<pad> the cat</s>"]).to_pylist()
    assert min(tokens) > 1
    tokenizer = Tokenizer.from_str(content)
    assert [tokenizer.id_to_token(number) for number in (0, 1)] == ["<pad>", "</s>"]
    assert tokenizer.decode(tokens) == "<pad> the cat</s>"
