from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from experiments.transformer.model import (
    EncoderLayer,
    SequenceInput,
    TableInput,
    Transformer,
    flops_per_sample,
)
from experiments.transformer.settings import NgramSettings, TransformerSettings

SEQUENCE = TransformerSettings(
    vocabulary=11, length=9, outputs=3, hidden=8, heads=2, layers=2, dropout=0.0
)
TABLE = TransformerSettings(
    numeric=3, categories=(4, 2), outputs=3, hidden=8, heads=2, layers=2, dropout=0.0
)
NGRAMS = SEQUENCE.model_copy(update={"ngrams": NgramSettings(most=12, width=4)})
NUMERIC_ONLY = TABLE.model_copy(update={"categories": ()})
CATEGORIES_ONLY = TABLE.model_copy(update={"numeric": 0})
KINDS = [SEQUENCE, NGRAMS, TABLE, NUMERIC_ONLY, CATEGORIES_ONLY]


def _model(given: TransformerSettings) -> Transformer:
    torch.manual_seed(0)
    return Transformer(given).double()


def _inputs(given: TransformerSettings, samples: int = 4) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    if given.vocabulary:
        ids = torch.randint(1, given.vocabulary, (samples, given.length), generator=generator)
        ids[1, 5:] = 0
        weights = (ids > 0).double() / 3
        return (ids,) if given.ngrams is None else (ids, 1 + ids, weights)
    numeric = torch.randn(samples, given.numeric, generator=generator, dtype=torch.float64)
    columns = [torch.randint(size, (samples,), generator=generator) for size in given.categories]
    empty = torch.empty(samples, 0, dtype=torch.int64)
    return numeric, torch.stack(columns, 1) if columns else empty


def test_the_encoder_is_pytorch_s_read_at_the_cls_token() -> None:
    model = _model(SEQUENCE)
    layer = nn.TransformerEncoderLayer(
        8, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    for ours, theirs in zip(model.layers, encoder.layers, strict=True):
        assert isinstance(ours, EncoderLayer)
        state = {
            "self_attn.in_proj_weight": torch.cat((ours.query.weight, ours.key_value.weight)),
            "self_attn.in_proj_bias": torch.cat((ours.query.bias, ours.key_value.bias)),
            "self_attn.out_proj.weight": ours.out.weight,
            "self_attn.out_proj.bias": ours.out.bias,
            "linear1.weight": ours.up.weight, "linear1.bias": ours.up.bias,
            "linear2.weight": ours.down.weight, "linear2.bias": ours.down.bias,
            "norm1.weight": ours.norm_attention.weight, "norm1.bias": ours.norm_attention.bias,
            "norm2.weight": ours.norm_feed_forward.weight,
            "norm2.bias": ours.norm_feed_forward.bias,
        }  # fmt: skip
        theirs.load_state_dict(state)
    (ids,) = _inputs(SEQUENCE)
    tokens = model.input.embedding.weight[ids] + model.input.positions
    tokens = torch.cat((model.cls.expand(4, 1, 8), tokens), 1)
    padding = torch.cat((torch.zeros(4, 1, dtype=torch.bool), ids == 0), 1)
    encoded = encoder(tokens, src_key_padding_mask=padding)[:, 0]
    expected = model.head(model.norm(encoded))
    torch.testing.assert_close(model(ids), expected, rtol=1e-10, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(tokens=st.lists(st.integers(1, 10), max_size=6), padding=st.integers(0, 3))
def test_padding_changes_no_output(tokens: list[int], padding: int) -> None:
    model = _model(SEQUENCE)
    bare = torch.tensor([tokens], dtype=torch.int64)
    padded = torch.tensor([tokens + [0] * padding])
    companion = torch.ones(1, len(tokens) + padding, dtype=torch.int64)
    in_a_batch = torch.cat((padded.long(), companion))
    torch.testing.assert_close(model(in_a_batch)[:1], model(bare), rtol=1e-10, atol=1e-10)


def test_a_row_is_a_token_a_feature() -> None:
    """FT-Transformer, section 3.3, equation by equation."""
    tokenizer = TableInput(TABLE).double()
    numeric, categories = _inputs(TABLE)
    tokens, _ = tokenizer(numeric, categories)
    assert tokens.shape == (4, 5, 8)
    assert tokenizer.embedding is not None
    first, second = tokenizer.embedding.weight.split((4, 2))
    for row in range(4):
        for j in range(3):
            expected = tokenizer.bias[j] + numeric[row, j] * tokenizer.scale[j]
            torch.testing.assert_close(tokens[row, j], expected)
        torch.testing.assert_close(tokens[row, 3], first[categories[row, 0]])
        torch.testing.assert_close(tokens[row, 4], second[categories[row, 1]])


@pytest.mark.parametrize("given", KINDS)
def test_every_parameter_learns(given: TransformerSettings) -> None:
    model = _model(given)
    model(*_inputs(given)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("given", KINDS)
@pytest.mark.parametrize("layers", [1, 3])
def test_the_operations_are_those_pytorch_counts(given: TransformerSettings, layers: int) -> None:
    given = given.model_copy(update={"layers": layers, "feed_forward": 20})
    model = _model(given)
    # of the attention kernels on a CPU PyTorch counts the plain one alone
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*_inputs(given, samples=4)).sum().backward()
    assert counter.get_total_flops() == 4 * flops_per_sample(given)


def test_a_sequence_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence has 10 tokens, but the model has length=9"):
        SequenceInput(SEQUENCE)(torch.ones(1, 10, dtype=torch.int64))
