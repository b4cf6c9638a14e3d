from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.summarization.generation import GenerationSettings, generate
from experiments.summarization.model import END, PAD, T5Settings
from tests.experiments.summarization.references import BOTH, GATED, batch, lively_t5


def ending(settings: T5Settings, seed: int = 0) -> Any:
    """A model whose texts end now and then."""
    model = lively_t5(settings, seed)
    with torch.no_grad():
        first = model.decoder.block[0].layer[0].SelfAttention
        first.relative_attention_bias.weight.mul_(3)
        model.lm_head.weight[END].mul_(1.5)
    return model


def _sources(settings: T5Settings) -> tuple[Tensor, Tensor]:
    parts = [batch(settings, seed)[:2] for seed in range(4)]
    return torch.cat([inputs for inputs, _ in parts]), torch.cat([mask for _, mask in parts])


def _library_texts(model: Any, inputs: Tensor, mask: Tensor, how: GenerationSettings) -> list:
    texts = model.generate(
        input_ids=inputs, attention_mask=mask.long(), num_beams=how.beams,
        max_new_tokens=how.length, length_penalty=how.length_penalty,
        no_repeat_ngram_size=how.no_repeat_ngram, early_stopping=False, do_sample=False,
        use_cache=False, decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=END,
    ).tolist()  # fmt: skip
    return [[token for token in text if token not in (PAD, END)] for text in texts]


@BOTH
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize(
    ("penalty", "ngram"), [(1.0, 0), (0.0, 0), (2.0, 2), (-1.0, 1), (0.6, 3), (1.0, 2)]
)
def test_texts_are_those_of_a_search_of_all_texts_without_a_cache(settings, beams, penalty, ngram):
    how = GenerationSettings(
        beams=beams, length=12, length_penalty=penalty, no_repeat_ngram=ngram, batch=5
    )
    lengths = set()
    for seed in range(2):
        model, (inputs, mask) = ending(settings, seed), _sources(settings)
        texts = generate(model, inputs, mask, how)
        assert texts == _library_texts(model, inputs, mask, how)
        lengths |= {len(text) for text in texts}
    assert len(lengths) > 2  # some end, at different lengths


def test_a_model_in_training_is_refused():
    model, (inputs, mask) = ending(GATED).train(), _sources(GATED)
    with pytest.raises(ValueError, match=r"call model\.eval"):
        generate(model, inputs, mask, GenerationSettings())
