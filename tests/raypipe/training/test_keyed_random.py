from __future__ import annotations

import pytest
import scipy.stats
import torch

from raypipe.training import keyed_random
from tests import scenario

SAMPLES = torch.tensor([0, 1, 7, 2**32 + 1, 2**62 + 5])


@pytest.mark.parametrize(
    ("counter", "key", "expected"), scenario.cases(__file__, "tables")["philox"]
)
def test_the_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (torch.tensor([int(word, 16)]) for word in counter.split())
    k0, k1 = (int(word, 16) for word in key.split())
    block = keyed_random.philox((c0, c1, c2, c3), (k0, k1))[0].tolist()
    assert block == [int(word, 16) for word in expected.split()]


@pytest.mark.parametrize("draw", [keyed_random.uniform, keyed_random.normal, keyed_random.gumbel])
def test_a_sample_s_draws_do_not_depend_on_its_batch(draw) -> None:
    together = draw(3, 4, SAMPLES, 11)
    alone = torch.cat([draw(3, 4, SAMPLES[i : i + 1], 11) for i in range(len(SAMPLES))])
    assert torch.equal(together, alone)
    assert torch.equal(draw(3, 4, SAMPLES, 6), together[:, :6])


def test_seed_stream_sample_and_position_make_the_counter_and_the_key() -> None:
    """Also the largest; the words of a position are those of a block of four."""
    drawn = keyed_random.words(2**64 - 2, 2**32 - 1, SAMPLES, 9)
    block, stream = (torch.full_like(SAMPLES, word) for word in (2, 2**32 - 1))
    counter = (block, stream, SAMPLES % 2**32, SAMPLES // 2**32)
    assert torch.equal(drawn[:, 8], keyed_random.philox(counter, (2**32 - 2, 2**32 - 1))[:, 0])


def test_distributions() -> None:
    samples = torch.arange(500)
    for draws, law in (
        (keyed_random.uniform(0, 0, samples, 101), scipy.stats.uniform()),
        (keyed_random.normal(0, 1, samples, 101), scipy.stats.norm()),
        (keyed_random.gumbel(0, 2, samples, 101), scipy.stats.gumbel_r()),
    ):
        assert scipy.stats.kstest(draws.flatten().double().numpy(), law.cdf).pvalue > 1e-3
    double = keyed_random.uniform(0, 0, samples, 101, torch.float64)
    assert torch.equal(keyed_random.uniform(0, 0, samples, 101).double(), double)
    upper = keyed_random.words(0, 0, samples, 101) // 2**9  # of which none rounds to 1
    assert torch.equal(double, (2 * upper + 1) / 2**24)


@pytest.mark.parametrize(("seed", "stream"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_refuses_what_does_not_fit_the_counter(seed: int, stream: int) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        keyed_random.words(seed, stream, SAMPLES, 4)
