"""The language model against its formulae, its sizes, its operations and its loss."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lm_pretrain.model import LanguageModel, LmSettings, flops_per_token, large, medium
from experiments.lm_pretrain.training import random_task
from tests.experiments.references import STEP, counted_flops, lively, parameter_count

SMALL = LmSettings(vocabulary=11, width=12, heads=3, layers=2, feed_forward=10, context=9)
BOTH = itertools.product(("swiglu", "gelu"), (False, True))
EACH = pytest.mark.parametrize(
    "settings", [SMALL.model_copy(update={"mlp": mlp, "tied": tied}) for mlp, tied in BOTH], ids=str
)


def _model(settings: LmSettings) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(settings)


def _tokens(settings: LmSettings, length: int = SMALL.context) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(settings.vocabulary, (2, length), generator=generator)


def _explicit_logits(model: LanguageModel, tokens: Tensor) -> Tensor:
    """The model from its formulae, with torch's attention, of one sequence; ``[L, V]``."""
    s, state = model.settings, model.state_dict()
    e = s.width // s.heads
    speeds = 10_000.0 ** (-2 * torch.arange(e // 2, dtype=torch.float64) / e)
    angles = torch.arange(len(tokens), dtype=torch.float64)[:, None] * speeds

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight

    def turned(x: Tensor) -> Tensor:
        turn = torch.polar(torch.ones_like(angles), angles)
        z = torch.complex(x[..., : e // 2], x[..., e // 2 :]) * turn
        return torch.cat((z.real, z.imag), 2)

    x = state["embedding.weight"][tokens]
    for n in range(s.layers):
        layer = {k.removeprefix(f"layers.{n}."): v for k, v in state.items() if f"layers.{n}." in k}
        h = norm(x, layer["norm_attention.weight"]) @ layer["attention.query_key_value.weight"].T
        queries, keys, values = h.view(-1, 3, s.heads, e).permute(1, 2, 0, 3)
        h = F.scaled_dot_product_attention(turned(queries), turned(keys), values, is_causal=True)
        x = x + h.transpose(0, 1).flatten(1) @ layer["attention.out.weight"].T
        h = norm(x, layer["norm_feed_forward.weight"]) @ layer["feed_forward.up.weight"].T
        if s.mlp == "swiglu":
            h = F.silu(h[:, : s.feed_forward]) * h[:, s.feed_forward :]
        else:
            h = F.gelu(h)
        x = x + h @ layer["feed_forward.down.weight"].T
    output = state["embedding.weight" if s.tied else "head.weight"]
    return norm(x, state["norm.weight"]) @ output.T


@EACH
def test_the_logits_are_those_of_the_formulae(settings):
    model, tokens = lively(_model(settings).double()), _tokens(settings)
    expected = torch.stack([_explicit_logits(model, row) for row in tokens])
    assert expected.std() > 0.5
    # the angles are tabled in single precision
    torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)


def test_the_sizes_are_those_of_the_workload():
    smaller = medium().model_copy(update={"mlp": "gelu", "tied": True})
    counts = [parameter_count(LanguageModel, size) for size in (medium(), smaller, large())]
    layer = 4 * 512**2 + 3 * 512 * 1536 + 2 * 512
    assert counts[0] == 16 * layer + 2 * 20_000 * 512 + 512
    assert [round(count / 1e6) for count in counts] == [75, 52, 757]


def test_the_initial_weights_are_those_of_gpt_2():
    model = _model(LmSettings(layers=8))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
        else:
            written = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            std = 0.02 / 4 if written else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name


@EACH
def test_flops_are_those_that_pytorch_counts(settings):
    model, tokens = _model(settings), _tokens(settings)
    found = counted_flops(lambda: model(tokens).sum().backward())
    assert found == tokens.numel() * flops_per_token(settings)


def test_a_sequence_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match="a sequence of 10 tokens exceeds the model's context=9"):
        _model(SMALL)(_tokens(SMALL, 10))


def test_the_loss_sums_what_each_next_token_costs():
    task = random_task(SMALL)
    model, batch = task.build_model().double(), torch.stack([task.data[i] for i in range(3)])
    loss = task.loss(model, batch, STEP)
    probabilities = model(batch[:, :-1]).softmax(2)
    expected = -probabilities.gather(2, batch[:, 1:, None]).log().sum()
    torch.testing.assert_close(loss.total, expected)
    assert loss.total.dtype == torch.float64
    assert (loss.weight, task.counts) == (3 * SMALL.context, "tokens")
