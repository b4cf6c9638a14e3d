"""Counter-based random numbers, independent of the worker that draws them.

Draws are keyed by ``(seed, stream, sample, position)`` with the counter-based generator
Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011).
Sample ``i`` gets the same numbers on any device, in any worker and in any micro-batch. Between
CPU and GPU they agree up to the rounding of the logarithm and the sine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MANTISSA = 23  # keeps the largest uniform draw below one in single precision


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> Tensor:
    """Return four 32-bit words per counter: the Philox4x32-10 block function.

    The counter's words are int64 tensors of one shape with values below ``2**32``. The result has
    the same type and range, with a new last dimension of four. The product of two words wraps
    around in int64 with the correct bits, so a shift and a mask extract its upper half.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((high >> 32) & _WORD) ^ c1 ^ k0
        c2 = ((low >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = high & _WORD, low & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def words(seed: int, stream: int, samples: Tensor, n: int) -> Tensor:
    """Return ``n`` uniform 32-bit words per sample, as int64 ``[len(samples), n]``.

    ``samples`` are non-negative int64 indices; the result is on their device. ``stream``
    separates draws for different purposes.

    Raises:
        ValueError: the seed is outside [0, 2**64) or the stream is outside [0, 2**32).

    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"the seed is {seed}; it must lie in [0, 2**64)")
    if not 0 <= stream <= _WORD:
        raise ValueError(f"the stream is {stream}; it must lie in [0, 2**32)")
    blocks = math.ceil(n / 4)
    block = torch.arange(blocks, device=samples.device).expand(len(samples), blocks)
    sample = samples[:, None].expand(len(samples), blocks)
    counter = (block, torch.full_like(block, stream), sample & _WORD, (sample >> 32) & _WORD)
    return philox(counter, (seed & _WORD, seed >> 32)).flatten(1)[:, :n]


def uniform(
    seed: int, stream: int, samples: Tensor, n: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return uniform draws ``[len(samples), n]`` in (0, 1), which are multiples of 2**-24."""
    bits = words(seed, stream, samples, n) >> (32 - _MANTISSA)
    return (bits.to(dtype) + 0.5) * 2.0**-_MANTISSA


def normal(
    seed: int, stream: int, samples: Tensor, n: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return standard normal draws ``[len(samples), n]`` (Box and Muller 1958)."""
    pairs = uniform(seed, stream, samples, n + n % 2, dtype).view(len(samples), -1, 2)
    radius = torch.sqrt(-2 * torch.log(pairs[..., 0]))
    angle = 2 * math.pi * pairs[..., 1]
    draws = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)
    return draws.flatten(1)[:, :n]


def gumbel(
    seed: int, stream: int, samples: Tensor, n: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return standard Gumbel draws ``[len(samples), n]``.

    ``argmax(logits + draws)`` is a categorical draw.
    """
    return -torch.log(-torch.log(uniform(seed, stream, samples, n, dtype)))


def seed_all(seed: int, device: torch.device) -> None:
    """Seed torch like ``manual_seed``, which formats a stack trace per absent device type."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
