"""Data sheets of NVIDIA's cards: memory, bandwidth, peak FLOP/s, link and power."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from raypipe.config.validation import did_you_mean
from raypipe.config.yaml_text import load_yaml
from raypipe.errors import ConfigError
from raypipe.hardware import Precision, supported_precisions

_FILE = Path(__file__).with_name("data_sheets.yaml")
_BRANDS = frozenset(("nvidia", "tesla", "geforce"))
#: name parts that do not change the peak: memory size and type, connector, generation
_NO_MATTER = r"(?: \d+gb?| sxm\d?| pcie| hbm\d\w?| generation)*"


@dataclass(frozen=True)
class Card:
    """A card: memory in bytes, bandwidths in bytes/s, peaks in FLOP/s by precision, and watts.

    ``reports`` is the start of the name that NVML and torch report, ``link`` the bandwidth to
    another card of the machine in one direction, ``capability`` the compute capability.
    """

    name: str
    reports: str
    memory_bytes: int
    bandwidth: float
    peaks: Mapping[Precision, float]
    link: float
    power_w: float
    capability: float

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions that the card supports."""
        return tuple(p for p in supported_precisions(str(self.capability)) if p in self.peaks)


@cache
def cards() -> Mapping[str, Card]:
    """Return all cards by name."""
    found = load_yaml(_FILE.read_text(encoding="utf-8"), str(_FILE))["cards"]
    return {
        name: Card(
            name,
            each["reports"],
            each["memory_mib"] * 2**20,
            each["bandwidth"] * 1e9,
            {precision: peak * 1e12 for precision, peak in each["tflops"].items()},
            each["link"] * 1e9,
            each["power_w"],
            each["capability"],
        )
        for name, each in found.items()
    }


def resolve(name: str, known: Mapping[str, Card]) -> Card:
    """Return the card that a user names: ``RTX A6000``, ``h100-pcie``, ``a100-80``.

    A name may leave out the brand, and all that no other card shares. Of variants of equal memory
    it is the SXM module, which machines with several cards have.

    Raises:
        ConfigError: no card has this name, or several do.

    """
    wanted = _words(name)
    matching = [card for card in known.values() if wanted and wanted <= _words(card.name)]
    exact = [card for card in matching if _model(_words(card.name)) == _model(wanted)]
    for found in (exact, matching):
        modules = [card for card in found if "SXM" in card.name]
        if len(found) == 1 or (modules and len({card.memory_bytes for card in found}) == 1):
            return (modules or found)[0]
    if not matching:
        near = did_you_mean(name.upper(), list(known))
        raise ConfigError(f"--card {name}: unknown card{near} (`--card all` lists all)")
    names = [card.name for card in exact or matching]
    raise ConfigError(f"--card {name}: several cards have this name: {', '.join(names)}; give one")


def of_device(device_name: str, memory_bytes: int) -> Card | None:
    """Return the card of a name that NVML and torch report; None for an unlisted one.

    Of several with the same name, it is the one whose memory is nearest. A variant with another
    peak (laptop, a slice by MIG or vGPU) is unlisted.
    """
    found = _named(device_name)
    return min(found, key=lambda card: abs(card.memory_bytes - memory_bytes), default=None)


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Return the dense peak of a GPU in FLOP/s, the denominator of model FLOPs utilization (MFU).

    None for an unlisted card, a variant with a different peak (laptop, a slice by MIG or vGPU), a
    precision that the card does not support, and the CPU.
    """
    if device_name == "cpu":  # to read the sheets takes 33 ms, in every worker
        return None
    # cards of the same name have the same peaks
    return next((card.peaks.get(precision) for card in _named(device_name)), None)


def _named(device_name: str) -> list[Card]:
    """Return the cards of a reported name, which may differ in memory."""
    words = re.split(r"[\s-]+", device_name.lower())
    name = " ".join(word for word in words if word not in _BRANDS)
    found = [c for c in cards().values() if re.fullmatch(re.escape(c.reports) + _NO_MATTER, name)]
    kinds = [kind for kind in ("sxm", "pcie") if kind in name]
    return [c for c in found if any(kind in c.name.lower() for kind in kinds)] or found


def _words(name: str) -> frozenset[str]:
    """Return the words of a name; a memory size is a number of GB with or without its unit."""
    words = re.findall(r"\d+(?=gb?(?![a-z0-9]))|[a-z0-9]+", name.lower())
    return frozenset(words) - {*_BRANDS, "g", "gb", "generation"}


def _model(words: Iterable[str]) -> frozenset[str]:
    """Return the words without numbers, such as memory sizes."""
    return frozenset(word for word in words if not word.isdecimal())
