from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.errors import ConfigError
from raypipe.hardware import Precision, supported_precisions
from raypipe.training.data_sheets import cards, of_device, peak_flops, resolve

KNOWN = cards()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("a6000", "RTX A6000"),
        ("h100-80", "H100 SXM 80GB"),
        ("h100-pcie", "H100 PCIe 80GB"),
        ("a100-40", "A100 SXM 40GB"),
        ("rtx 3080", "RTX 3080"),
        ("GeForce RTX 4090", "RTX 4090"),
        ("a10", "A10"),
        ("h200", "H200 SXM 141GB"),
    ],
)
def test_a_card_has_short_names(given: str, meant: str) -> None:
    assert resolve(given, KNOWN).name == meant


def test_an_unknown_card_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"--card rtx a600: unknown card; nearest.*RTX A6000"):
        resolve("rtx a600", KNOWN)
    with pytest.raises(ConfigError, match="unknown card"):
        resolve("", KNOWN)


@pytest.mark.parametrize("given", ["V100", "a100", "h100", "RTX 4060 Ti"])
def test_a_name_of_several_memories_is_refused_with_all_of_them(given: str) -> None:
    with pytest.raises(ConfigError, match=r"several cards have this name: .*GB.*GB"):
        resolve(given, KNOWN)


def test_every_card_is_whole_and_plausible() -> None:
    assert len(KNOWN) > 50
    for card in KNOWN.values():
        assert card.source, card.name
        assert 8 * 2**30 - 2**25 < card.memory_bytes < 200 * 2**30, card.name
        assert 2.5e11 < card.bandwidth < 9e12, card.name
        assert 60 < card.power_w <= 1200, card.name
        assert set(card.peaks) == set(supported_precisions(str(card.capability))) - {"fp8"}
        assert resolve(card.name, KNOWN) == card


@pytest.mark.parametrize(
    ("reported", "mebibytes", "meant"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, "A100 SXM 80GB"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100 PCIe 80GB"),
        ("Tesla V100-SXM2-32GB", 32510, "V100 SXM2 32GB"),
        ("NVIDIA H100 80GB HBM3", 81559, "H100 SXM 80GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "RTX 4060 Ti 16GB"),
        ("NVIDIA GB10", 122570, "GB10"),
    ],
)
def test_a_device_is_a_card(reported: str, mebibytes: int, meant: str) -> None:
    found = of_device(reported, mebibytes * 2**20)
    assert found is not None
    assert found.name == meant
    by_name = of_device(reported)
    assert by_name is not None
    assert by_name.peaks == found.peaks


def test_a_file_adds_cards_and_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cards.yaml"
    file.write_text(
        "cards:\n"
        "  rtx a6000: {price_per_hour: 0.8}\n"
        "  Mine: {memory_mib: 1024, bandwidth: 100, tflops: {fp32: 1}, power_w: 50,"
        " capability: 8.6}\n"
    )
    monkeypatch.setenv("RAYPIPE_CARDS", str(file))
    for found in (cards(), cards(file)):
        assert found["RTX A6000"].price_per_hour == 0.8
        assert found["RTX A6000"].bandwidth == KNOWN["RTX A6000"].bandwidth
        assert found["Mine"].memory_bytes == 2**30
        assert found["Mine"].precisions == ("fp32",)


def test_a_peak_in_fp8_makes_no_predicted_precision(tmp_path: Path) -> None:
    file = tmp_path / "cards.yaml"
    file.write_text("cards: {L4: {tflops: {fp32: 30, bf16: 121, fp8: 242}}}")
    card = cards(file)["L4"]
    assert card.peaks["fp8"] == 242e12  # of the MFU of a measured training
    assert card.precisions == ("fp32", "bf16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cards: {Mine: {power_w: 5}}", "cards.Mine.memory_mib: Field required; cards.Mine.b"),
        ("cards: {L4: {power: 5}}", "cards.L4.power: "),
        ("cards: {L4: {power_w: -5}}", "cards.L4.power_w: "),
        ("cards: [", "not valid YAML"),
        ("[]", "has no `cards:`"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "cards.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        cards(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read"):
        cards(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA GH200 144G HBM3e", "fp16", 989.4),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA A10G", "bf16", 70.0),
        ("Tesla V100S-PCIE-32GB", "fp16", 130.0),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "fp32", 44.1),
    ],
)
def test_the_longest_name_counts(name: str, precision: Precision, tflops: float) -> None:
    assert peak_flops(name, precision) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "NVIDIA",
        "NVIDIA H100",  # which of them is not said
        "NVIDIA T400",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A40-8Q",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "AMD Instinct MI300X",
    ],
)
def test_a_card_whose_peak_is_not_known_has_none(name: str) -> None:
    assert peak_flops(name, "fp32") is None
    assert peak_flops(name, "bf16") is None
