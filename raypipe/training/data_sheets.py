"""Data sheets of NVIDIA's cards: memory, bandwidth, peak FLOP/s, link and power."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
)

from raypipe.config.settings import Settings
from raypipe.config.yaml_text import load_yaml
from raypipe.errors import ConfigError
from raypipe.hardware import Precision, supported_precisions

#: environment variable with a file of further cards and prices
CARDS = "RAYPIPE_CARDS"
_SHIPPED = Path(__file__).with_name("data_sheets.yaml")
_BRANDS = frozenset(("nvidia", "tesla", "geforce"))
#: name parts that do not change the peak: memory size and type, connector, generation
_NO_MATTER = re.compile(r"\d+gb?|sxm\d?|pcie|hbm\d\w?|generation")


_Giga = Annotated[PositiveFloat, AfterValidator(lambda value: value * 1e9)]
_Tera = Annotated[PositiveFloat, AfterValidator(lambda value: value * 1e12)]


class Card(Settings):
    """A card: bytes, bytes/s, FLOP/s by precision, and watts. A file has other units."""

    name: str
    """Name of the card."""
    reports: Annotated[str, AfterValidator(str.lower)]
    """Start of the name that NVML and torch report; by default the name of the card."""
    memory_bytes: PositiveInt = Field(validation_alias="memory_mib")
    """Memory, in MiB in a file."""
    bandwidth: _Giga
    """Memory bandwidth, in GB/s in a file."""
    peaks: Mapping[Precision, _Tera] = Field(validation_alias="tflops")
    """Dense peak by precision, in TFLOP/s in a file."""
    link: _Giga = 16e9
    """Bandwidth to another card of the machine in one direction, in GB/s in a file."""
    power_w: PositiveFloat
    """Board power, W."""
    capability: PositiveFloat
    """Compute capability."""
    source: str
    """Where the values are from."""
    price_per_hour: PositiveFloat | None = None
    """Price of one card per hour."""

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions that the card supports."""
        supported = supported_precisions(str(self.capability))
        return tuple(p for p in supported if p in self.peaks)

    @field_validator("memory_bytes")
    @classmethod
    def _in_bytes(cls, mebibytes: int) -> int:
        return mebibytes * 2**20


def cards(file: str | os.PathLike[str] | None = None) -> dict[str, Card]:
    """Return all cards by name: those that come with raypipe, changed and extended by a file.

    Args:
        file: a YAML file in the form of the shipped one; by default that of RAYPIPE_CARDS, if set.

    Raises:
        ConfigError: the file cannot be read, has wrong values, or a new card lacks some.

    """
    own = file or os.environ.get(CARDS)
    return _cards(None if own is None else Path(own))


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
        near = get_close_matches(_text(name), [_text(each) for each in known], 4, 0.4)
        names = [each for text in near for each in known if _text(each) == text]
        raise ConfigError(
            f"--card {name}: unknown card; nearest names: {', '.join(names) or 'none'} "
            "(`--card all` lists all; add others with RAYPIPE_CARDS=FILE)"
        )
    names = [card.name for card in exact or matching]
    raise ConfigError(f"--card {name}: several cards have this name: {', '.join(names)}; give one")


def of_device(device_name: str, memory_bytes: int | None = None) -> Card | None:
    """Return the card of a name that NVML and torch report; None for an unlisted one.

    Of several with the same name, it is the one whose memory is nearest. A variant with another
    peak (laptop, a slice by MIG or vGPU) is unlisted.
    """
    listed = list(_cards(None).values())
    words = [word for word in re.split(r"[\s-]+", device_name.lower()) if word not in _BRANDS]
    for length in range(len(words), 0, -1):  # the longest name first: A10G before A10
        start = " ".join(words[:length])
        found = [card for card in listed if card.reports == start]
        if found:
            if not all(_NO_MATTER.fullmatch(word) for word in words[length:]):
                return None
            connected = [c for c in found if set(words[length:]) & _connector(c.name)] or found
            said = re.search(r"\b(\d+)gb?\b", " ".join(words[length:]))
            listed_bytes = int(said[1]) * 2**30 if said else found[0].memory_bytes
            size = memory_bytes or listed_bytes
            return min(connected, key=lambda card: abs(card.memory_bytes - size))
    return None


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Return the dense peak of a GPU in FLOP/s, the denominator of model FLOPs utilization (MFU).

    None for an unlisted card, a variant with a different peak (laptop, a slice by MIG or vGPU), a
    precision that the card does not support, and the CPU.
    """
    card = of_device(device_name)
    return None if card is None else card.peaks.get(precision)


class _File(Settings):
    cards: dict[str, dict[str, Any]]
    sources: Mapping[str, str] = {}


@cache
def _cards(file: Path | None) -> dict[str, Card]:
    """Return the shipped cards, changed and extended by a file."""
    shipped = _document(_SHIPPED)
    given = _File(cards={}) if file is None else _document(file)
    values, sources = dict(shipped.cards), {**shipped.sources, **given.sources}
    names = {_words(name): name for name in values}
    for name, own in given.cards.items():
        known = names.get(_words(name), name)
        values[known] = {**values.get(known, {"source": str(file)}), **own}
    cards = {}
    for name, each in values.items():
        source = sources.get(each["source"], each["source"])
        try:
            cards[name] = Card.model_validate(
                {"name": name, "reports": name, **each, "source": source}
            )
        except ValidationError as error:
            mistakes = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            text = f"; cards.{name}.".join(mistakes)
            raise ConfigError(f"{file}: cards.{name}.{text}") from error
    return cards


def _document(file: Path) -> _File:
    try:
        return _File.model_validate(load_yaml(file.read_text(encoding="utf-8"), str(file)))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigError(f"{file}: has no `cards:` with values by name") from error


def _text(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", name.lower()).strip()


def _words(name: str) -> frozenset[str]:
    """Return the words of a name; a memory size is a number of GB with or without its unit."""
    words = (re.sub(r"^(\d+)(gb|g)$", r"\1", word) for word in _text(name).split())
    return frozenset(word for word in words if word not in (*_BRANDS, "gb", "generation"))


def _model(words: Iterable[str]) -> frozenset[str]:
    """Return the words without memory sizes, which are numbers of less than four digits."""
    return frozenset(word for word in words if not word.isdecimal() or len(word) > 3)


def _connector(name: str) -> set[str]:
    """Return the connectors that a card's name says, as device names have them."""
    words = set(_text(name).split())
    return {"sxm2", "sxm3", "sxm4", "sxm5"} if "sxm" in words else words & {"pcie"}
