from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.pabbo_lda.pabbo.model import (
    LARGE,
    SMALL,
    PabboModel,
    PabboModelSettings,
    attend,
    load_model,
)
from experiments.pabbo_lda.pabbo.training import PabboSettings, PabboTask


def _model(settings: PabboModelSettings = SMALL) -> PabboModel:
    torch.manual_seed(0)
    return PabboModel(settings).double()


def _torch_encoder(model: PabboModel) -> nn.TransformerEncoder:
    """PyTorch's encoder with the weights of ours."""
    s = model.settings
    layer = nn.TransformerEncoderLayer(
        s.d_model, s.heads, s.feed_forward, dropout=0.0, batch_first=True
    )
    encoder = nn.TransformerEncoder(layer, s.layers, enable_nested_tensor=False).double()
    for ours, theirs in zip(model.layers, encoder.layers, strict=True):
        state = {
            "self_attn.in_proj_weight": ours.query_key_value.weight,
            "self_attn.in_proj_bias": ours.query_key_value.bias,
            "self_attn.out_proj.weight": ours.out.weight,
            "self_attn.out_proj.bias": ours.out.bias,
            "linear1.weight": ours.up.weight, "linear1.bias": ours.up.bias,
            "linear2.weight": ours.down.weight, "linear2.bias": ours.down.bias,
            "norm1.weight": ours.norm_attention.weight, "norm1.bias": ours.norm_attention.bias,
            "norm2.weight": ours.norm_feed_forward.weight,
            "norm2.bias": ours.norm_feed_forward.bias,
        }  # fmt: skip
        theirs.load_state_dict(state)
    return encoder


def _tokens(settings: PabboModelSettings, size: int, points: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    context = torch.randn(2, 3, size, settings.d_model, generator=generator, dtype=torch.float64)
    targets = torch.randn(2, points, settings.d_model, generator=generator, dtype=torch.float64)
    return context, targets


@pytest.mark.parametrize("settings", [SMALL, LARGE])
def test_the_encoder_is_pytorch_s_with_the_context_as_keys(settings: PabboModelSettings) -> None:
    model = _model(settings)
    context, targets = _tokens(settings, size=5)
    joint = torch.cat((context, targets[:, None].expand(-1, 3, -1, -1)), 2).flatten(0, 1)
    blocked = torch.zeros(12, 12, dtype=torch.bool)
    blocked[:, 5:] = True
    encoder = _torch_encoder(model).train()  # the training path: no fused inference kernel
    expected = encoder(joint, mask=blocked)[:, 5:].view(2, 3, 7, -1)
    torch.testing.assert_close(model(context, targets), expected, rtol=1e-10, atol=1e-10)


def test_the_cpu_s_attention_is_the_fused_one_with_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 2, 7, 4), (3, 2, 5, 4), (3, 2, 5, 4))
    tensors = [
        torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes
    ]
    for mask in (None, torch.arange(5) < torch.tensor([1, 3, 5])[:, None, None, None]):
        results = []
        for attention in (attend, nn.functional.scaled_dot_product_attention):
            out = attention(*tensors, mask)
            results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
        torch.testing.assert_close(results[0], results[1])


def test_a_mask_is_a_shorter_context() -> None:
    model = _model()
    context, targets = _tokens(SMALL, size=6)
    sizes = torch.tensor([[1, 6, 3], [2, 5, 4]])
    masked = model(context, targets, torch.arange(6) < sizes[..., None])
    for b in range(2):
        for r in range(3):
            short = context[b : b + 1, r : r + 1, : sizes[b, r]]
            alone = model(short, targets[b : b + 1])
            torch.testing.assert_close(masked[b, r], alone[0, 0])


def test_scores_are_the_acquisition_mlp_of_the_pair_and_the_time() -> None:
    model = _model()
    context, targets = _tokens(SMALL, size=4)
    encoded = model(context, targets)
    pairs = torch.tensor([[[0, 1], [5, 2]], [[3, 6], [4, 0]]])
    scores = model.score(encoded, pairs, 0.3)
    for b in range(2):
        for r in range(3):
            for p, (i, j) in enumerate(pairs[b].tolist()):
                ends = (encoded[b, r, i], encoded[b, r, j], torch.tensor([0.3]).double())
                hidden = torch.relu(model.acquisition_entry(torch.cat(ends)))
                torch.testing.assert_close(scores[b, r, p], model.acquisition(hidden)[0])


def test_parameter_counts_are_those_of_the_published_code() -> None:
    assert sum(p.numel() for p in PabboModel(SMALL).parameters()) == 38_659
    # two point embeddings, the preferences, six layers, two heads
    embeddings = 2 * (2 * 64 + 2 * (64 * 64 + 64)) + 3 * 64
    layer = 4 * (64 * 64 + 64) + 64 * 128 + 128 + 128 * 64 + 64 + 4 * 64
    heads = 64 * 128 + 128 + 2 * 128 + 2 + 129 * 128 + 128 + 128 * 128 + 128 + 128 + 1
    assert sum(p.numel() for p in PabboModel(LARGE).parameters()) == embeddings + 6 * layer + heads


def test_weights_and_settings_survive_the_file(tmp_path: Path) -> None:
    settings = PabboModelSettings(d_model=8, heads=2, layers=1, feed_forward=4, embedding_depth=3)
    model = PabboModel(settings)
    metadata = dict(PabboTask(PabboSettings(model=settings)).metadata())
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata)
    loaded = load_model(tmp_path / "model.safetensors")
    assert loaded.settings == settings
    assert not loaded.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="does not hold a PABBO model"):
        load_model(tmp_path / "other.safetensors")
