from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from experiments.summarization.model import (
    PAD,
    T5,
    Attention,
    DecoderLayer,
    LayerCache,
    RelativeBias,
    T5Settings,
    flops_per_sample,
    mt5_1_2b,
    relative_buckets,
    small,
    t5_220m,
)
from tests.experiments.summarization.references import (
    BOTH,
    GATED,
    PLAIN,
    batch,
    double,
    library_model,
    library_names,
    lively,
)


def _decoder_inputs(targets: Tensor) -> Tensor:
    return F.pad(targets[:, :-1], (1, 0), value=PAD)


def _parameters(settings: T5Settings) -> int:
    with torch.device("meta"):
        model = T5(settings)
    return sum(parameter.numel() for parameter in model.parameters())


def _loss(model: nn.Module, settings: T5Settings) -> Tensor:
    inputs, mask, targets = batch(settings)
    logits = model(inputs, mask, _decoder_inputs(targets))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@BOTH
def test_logits_and_loss_are_those_of_transformers(settings: T5Settings) -> None:
    model, (inputs, mask, targets) = lively(settings), batch(settings)
    reference = double(library_model(model))
    labels = targets.clone()
    labels[0, 7:] = -100  # a shorter summary
    decoder_inputs = _decoder_inputs(targets)
    decoder_inputs[0, 8:] = PAD
    with torch.no_grad():
        expected = reference(input_ids=inputs, attention_mask=mask.long(), labels=labels)
        logits = model(inputs, mask, decoder_inputs)
    assert expected.logits.std() > 0.5
    counted = labels != -100
    torch.testing.assert_close(logits[counted], expected.logits[counted])
    loss = F.cross_entropy(logits[counted], labels[counted])
    torch.testing.assert_close(loss, expected.loss)


def test_logits_are_those_of_the_mt5_of_transformers() -> None:
    model, (inputs, mask, targets) = lively(GATED), batch(GATED)
    reference = double(library_model(model, "MT5"))
    decoder_inputs = _decoder_inputs(targets)
    expected = reference(
        input_ids=inputs, attention_mask=mask.long(), decoder_input_ids=decoder_inputs
    )
    logits = model(inputs, mask, decoder_inputs)
    torch.testing.assert_close(logits, expected.logits)


@BOTH
def test_gradients_are_those_of_transformers(settings: T5Settings) -> None:
    model, (inputs, mask, targets) = lively(settings), batch(settings)
    reference = double(library_model(model))
    reference(input_ids=inputs, attention_mask=mask.long(), labels=targets).loss.backward()
    _loss(model, settings).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        parameter.data = parameter.grad
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, gradient in library_names(model).items():
        if name in theirs:  # a tied weight has one name there
            torch.testing.assert_close(gradient, theirs[name], msg=name)
    assert set(theirs) <= set(library_names(model))


@BOTH
def test_padding_of_the_source_changes_nothing(settings: T5Settings) -> None:
    model, (inputs, mask, targets) = lively(settings), batch(settings)
    decoder_inputs = _decoder_inputs(targets)
    logits = model(inputs, mask, decoder_inputs)
    for row in range(len(inputs)):
        alone = inputs[row : row + 1, mask[row]]
        whole = torch.ones_like(alone, dtype=torch.bool)
        expected = model(alone, whole, decoder_inputs[row : row + 1])[0]
        torch.testing.assert_close(logits[row], expected)
    other = inputs.where(mask, 7)
    torch.testing.assert_close(model(other, mask, decoder_inputs), logits)


def test_a_token_changes_no_logit_before_it_and_those_from_it_on() -> None:
    model, (inputs, mask, targets) = lively(GATED), batch(GATED)
    logits = model(inputs, mask, targets)
    for changed in (1, 8, 15):
        other = targets.clone()
        other[:, changed] = 2 + (other[:, changed] - 1) % (GATED.vocabulary - 2)
        difference = (model(inputs, mask, other) - logits).abs().amax((0, 2))
        assert (difference[:changed] < 1e-12).all()
        assert (difference[changed:] > 1e-6).all()


def test_a_source_without_a_token_gives_numbers() -> None:
    model, (inputs, mask, targets) = lively(PLAIN), batch(PLAIN)
    assert model(inputs, mask & False, targets).isfinite().all()


def test_attention_is_that_of_its_formula() -> None:
    """By hand: two tokens of width 2 in one head attend to three, with products unscaled."""
    settings = T5Settings(
        vocabulary=2, width=2, head_width=2, heads=1, feed_forward=1, layers=1, dropout=0.0
    )
    attention = Attention(settings).double().eval()
    identity = torch.eye(2, dtype=torch.float64)
    with torch.no_grad():
        attention.query.weight.copy_(identity)
        attention.key_value.weight.copy_(torch.cat((2 * identity, 3 * identity)))
        attention.out.weight.copy_(identity.flip(0))
    tokens = torch.tensor([[[1.0, 0.0], [0.5, -1.0]]], dtype=torch.float64)
    others = torch.tensor([[[1.0, 2.0], [0.0, 1.0], [-1.0, 0.5]]], dtype=torch.float64)
    bias = torch.tensor([[0.1, -0.2, 0.3], [0.0, 0.5, -1.0]], dtype=torch.float64)
    expected = torch.empty(2, 2, dtype=torch.float64)
    for i, (x, y) in enumerate(tokens[0].tolist()):
        scores = [
            math.exp(2 * (x * u + y * v) + bias[i, j].item())
            for j, (u, v) in enumerate(others[0].tolist())
        ]
        weights = [score / sum(scores) for score in scores]
        gathered = [
            sum(3 * w * other[k] for w, other in zip(weights, others[0].tolist(), strict=True))
            for k in range(2)
        ]
        expected[i] = torch.tensor(gathered[::-1])
    output = attention(tokens, *attention.keys_values(others), bias[None, None])
    torch.testing.assert_close(output[0], expected)


def _naive_bucket(distance: int, buckets: int, furthest: int, causal: bool) -> int:
    """One distance, key - query, after the description in Raffel et al. 2020, section 2.1."""
    first = 0
    if causal:
        distance = max(0, -distance)
    else:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    # the number of edges, spaced evenly in the logarithm, that the distance reaches
    ratio = furthest / exact
    edges = [exact * ratio ** (k / (buckets - exact)) for k in range(1, buckets - exact)]
    return first + exact + sum(distance >= edge * (1 - 1e-9) for edge in edges)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 12), (16, 40), (4, 3)])
def test_buckets_are_those_of_the_description(buckets: int, furthest: int, causal: bool) -> None:
    distances = torch.arange(-700, 701)
    classes = relative_buckets(distances, buckets, furthest, causal=causal)
    expected = [_naive_bucket(d, buckets, furthest, causal) for d in distances.tolist()]
    assert classes.tolist() == expected
    assert set(expected) == set(range(buckets)) - ({buckets // 2} if not causal else set())


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_are_those_of_transformers(causal: bool) -> None:
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(-5000, 5001)
    theirs = modeling.T5Attention._relative_position_bucket(distances, bidirectional=not causal)
    assert torch.equal(relative_buckets(distances, 32, 128, causal=causal), theirs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (1, 9), (4, 9), (1, 1)])
def test_biases_are_those_of_the_distances(causal: bool, queries: int, keys: int) -> None:
    bias = RelativeBias(GATED, causal=causal)
    nn.init.normal_(bias.weight)
    square = bias(queries, keys)
    assert square.shape == (1, GATED.heads, queries, keys)
    for q in range(queries):
        for k in range(keys):
            distance = k - (keys - queries + q)
            found = bias.weight[_naive_bucket(distance, 8, 12, causal)]
            assert torch.equal(square[0, :, q, k], found)


@BOTH
def test_decoding_with_a_cache_is_decoding_without(settings: T5Settings) -> None:
    model, (inputs, mask, targets) = lively(settings), batch(settings)
    decoder_inputs = _decoder_inputs(targets)
    expected = model(inputs, mask, decoder_inputs)
    states = model.encode(inputs, mask)
    cache = [LayerCache() for _ in model.decoder]
    parts = [
        model.decode(part, states, mask, cache)
        for part in decoder_inputs.split((1, 1, 5, 1, 8), dim=1)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)
    assert cache[-1].length == targets.shape[1]


def test_several_texts_of_a_source_are_decoded_as_each_alone() -> None:
    model, (inputs, mask, targets) = lively(GATED), batch(GATED)
    states = model.encode(inputs, mask)
    texts = torch.stack((targets, targets.flip(1)), dim=1)
    together = model.decode(texts.flatten(0, 1), states, mask).unflatten(0, (3, 2))
    for n in range(2):
        torch.testing.assert_close(together[:, n], model.decode(texts[:, n], states, mask))


def test_a_cache_computes_keys_and_values_of_the_source_once() -> None:
    model, (inputs, mask, targets) = lively(PLAIN), batch(PLAIN)
    states = model.encode(inputs, mask)
    cache = [LayerCache() for _ in model.decoder]
    model.decode(targets[:, :1], states, mask, cache)
    kept = [layer.source for layer in cache]
    logits = model.decode(targets[:, 1:2], torch.full_like(states, torch.nan), mask, cache)
    assert logits.isfinite().all()
    assert all(layer.source is pair for layer, pair in zip(cache, kept, strict=True))


@BOTH
def test_bfloat16_stays_finite_and_close(settings: T5Settings) -> None:
    torch.manual_seed(0)
    model, (inputs, mask, targets) = T5(settings), batch(settings)
    exact = model(inputs, mask, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(inputs, mask, targets)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=0.1 * exact.std().item())
    rounded.float().logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_the_norm_is_that_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    ours, theirs = T5(GATED).encoder_norm, modeling.T5LayerNorm(GATED.width)
    nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randn(50, GATED.width, generator=torch.Generator().manual_seed(0))
    for scale in (1e-3, 1.0, 1e3):  # the smallest is of the size of the epsilon
        torch.testing.assert_close(ours(scale * tokens), theirs(scale * tokens))


def test_the_norm_of_half_precision_tokens_has_statistics_in_single_precision() -> None:
    norm = T5(GATED.model_copy(update={"width": 512})).bfloat16().encoder_norm
    tokens = torch.randn(20, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = tokens.float()
    expected = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(norm(tokens), expected.bfloat16())


@BOTH
def test_gradients_with_recomputed_layers_are_equal(settings: T5Settings) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    settings = settings.model_copy(update={"dropout": 0.2})
    gradients = []
    for recompute in (False, True):
        model = lively(settings).train()
        if recompute:
            apply_activation_checkpointing(model, check_fn=set(model.blocks).__contains__)
        torch.manual_seed(5)
        _loss(model, settings).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_blocks_are_the_layers_and_hold_no_bias_of_a_stack() -> None:
    model = T5(GATED)
    blocks = list(model.blocks)
    assert len(blocks) == 2 + 3
    assert sum(isinstance(block, DecoderLayer) for block in blocks) == 3
    assert not any(isinstance(part, RelativeBias) for block in blocks for part in block.modules())


@BOTH
def test_one_graph_holds_the_whole_model(settings: T5Settings) -> None:
    torch.compiler.reset()
    model, (inputs, mask, targets) = lively(settings), batch(settings)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    logits = compiled(inputs, mask, targets)
    torch.testing.assert_close(logits, model(inputs, mask, targets))


def test_two_graphs_serve_all_lengths() -> None:
    """One of the first length, one of any."""
    torch.compiler.reset()
    model = lively(GATED.model_copy(update={"layers": 1, "decoder_layers": 1}))
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    inputs, mask, targets = batch(GATED)
    for source, target in ((14, 16), (9, 12), (12, 5), (7, 7)):
        given = inputs[:, :source], mask[:, :source], targets[:, :target]
        torch.testing.assert_close(compiled(*given), model(*given))
    assert graphs.frame_count == 2


@BOTH
def test_flops_are_those_that_pytorch_counts(settings: T5Settings) -> None:
    """With the attention as plain products; fused kernels count what they compute twice."""
    model, (inputs, mask, targets) = T5(settings), batch(settings)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(inputs, mask, targets).sum().backward()
    assert counter.get_total_flops() == 3 * flops_per_sample(settings, 14, 16)


def test_flops_of_long_texts_are_six_a_weight_and_token() -> None:
    s = t5_220m()
    layer = 4 * s.width**2 + 2 * s.width * s.feed_forward
    attention = 12 * 12 * 512 * 768 * (512 + 128 + 128 * 128 / 512)
    weights = 12 * (layer * 512 + (layer + 2 * s.width**2) * 128 + 2 * s.width**2 * 512)
    expected = 6 * (weights + 128 * s.vocabulary * s.width) + attention
    assert flops_per_sample(s, 512, 128) == expected


def test_the_sizes_are_those_of_the_workload() -> None:
    assert _parameters(t5_220m()) == 222_903_552  # what t5-base has in transformers
    assert _parameters(mt5_1_2b()) == 1_229_581_312  # as google/mt5-large
    assert _parameters(small()) < 2e6


def test_the_initial_weights_are_those_of_t5() -> None:
    torch.manual_seed(0)
    settings = T5Settings(layers=3, tied=False, head_width=16, feed_forward=600)
    for name, parameter in T5(settings).named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
            continue
        std = 128**-0.5
        if name == "embedding.weight":
            std = 1.0
        elif name.endswith("query.weight"):
            std = (128 * 16) ** -0.5
        elif name.endswith("attention.out.weight"):
            std = 64**-0.5
        elif name.endswith("down.weight"):
            std = 600**-0.5
        near = 0.3 if name.endswith("bias.weight") else 0.03
        assert parameter.std().item() == pytest.approx(std, rel=near), name


@pytest.mark.parametrize("tied", [False, True])
def test_logits_start_around_one(tied: bool) -> None:
    torch.manual_seed(0)
    settings = small().model_copy(update={"tied": tied})
    model, (inputs, mask, targets) = T5(settings).eval(), batch(settings)
    assert 0.3 < model(inputs, mask, targets).std() < 3


def test_tied_weights_are_one_matrix() -> None:
    assert "head.weight" not in T5(PLAIN).state_dict()
    untied = PLAIN.model_copy(update={"tied": False})
    assert _parameters(untied) - _parameters(PLAIN) == PLAIN.vocabulary * PLAIN.width


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative_distance": 4}, "relative_distance=4 must be more than half of"),
        ({"relative_buckets": 7}, "multiple of 2"),
        ({"vocabulary": 1}, "greater than or equal to 2"),
        ({"dropout": 1.0}, "less than 1"),
    ],
)
def test_settings_that_make_no_model_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        T5Settings.model_validate(GATED.model_dump() | changes)
