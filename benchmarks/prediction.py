"""Predict the published trainings and every GPU profile, next to the published numbers.

    python -m benchmarks.prediction            # keeps the stored rows of the same trainings
    python -m benchmarks.prediction --fresh    # predicts all of them again

``raypipe fit --card`` needs no GPU, and neither does this. Each training is predicted twice: at its
published micro-batch, for the memory, and at its effective batch, for the largest micro-batch that
fits. Published memory counts the CUDA context, so the predicted memory does, too.

Results: ``benchmarks/results/prediction/published.json`` and ``profiles.json``, and the tables of
``docs/explanation/prediction.md``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

import raypipe as rp
from raypipe.provenance import git_commit, package_version

PROJECT = Path(__file__).resolve().parents[1]
RESULTS = PROJECT / "benchmarks" / "results" / "prediction"
GB = 1e9


@dataclass(frozen=True)
class Training:
    """A training on a card: a configuration with its published or configured batch.

    ``memory`` is the published text, in GB; ``largest`` the published largest micro-batch.
    """

    name: str
    config: str
    card: str
    precision: str
    micro_batch: int
    effective_batch: int
    stage: str = "train"
    profile: str = "auto"
    memory: str = ""
    largest: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)


def _t5(card: str, precision: str, micro_batch: int, *, memory: str = "3 to 5") -> Training:
    return Training(
        *("T5 220M, Adafactor", "summarization", card, precision, micro_batch, 64),
        memory=memory,
        largest=str(micro_batch),
        overrides={"model": "t5_220m"},
    )


def _mt5(card: str, precision: str, micro_batch: int) -> Training:
    given = replace(_t5(card, precision, micro_batch, memory="10 to 15"), effective_batch=16)
    return replace(given, name="mT5 1.2B, Adafactor", overrides={"model": "mt5_1_2b"})


def _medium(precision: str, micro_batch: int, memory: str) -> Training:
    return Training(
        *("language model medium", "lm_pretrain", "RTX A6000", precision, micro_batch, 128),
        memory=memory,
        largest=str(micro_batch),
        overrides={"data.source": "random"},
    )


def _teleclass(precision: str, memory: str) -> Training:
    bert = {"length": 512, "vocabulary": 30522, "hidden": 768, "layers": 12}
    return Training(
        *("TELEClass, BERT size, 512 tokens", "teleclass", "RTX 3090", precision, 16, 64),
        memory=memory,
        largest="24 to 32",
        overrides={f"train.classifier.{key}": value for key, value in bert.items()},
    )


def _pabbo(size: str, batch: int, memory: str) -> Training:
    name = f"PABBO {size}"
    given = Training(name, "pabbo_lda", "RTX 3090", "fp32", batch, batch, memory=memory)
    return replace(given, stage=f"train_{size}")


PUBLISHED = (
    _t5("V100 SXM2 16GB", "fp32", 4),
    _t5("RTX 3080", "bf16", 2),
    _t5("RTX 4090", "bf16", 2),
    _t5("A100 SXM 40GB", "bf16", 8),
    _mt5("V100 SXM2 16GB", "fp32", 1),
    _mt5("RTX 3080", "bf16", 1),
    _mt5("RTX 4090", "bf16", 1),
    _mt5("A100 SXM 40GB", "bf16", 4),
    _medium("fp32", 12, "30"),
    _medium("fp16", 32, "20 to 25"),
    _teleclass("fp32", "14 to 16"),
    _teleclass("fp16", "6 to 8"),
    _pabbo("small", 32, "2 to 3"),
    _pabbo("large", 64, "6 to 8"),
)


#: a card for each GPU profile that needs no file or download
CARDS = {
    "lm_pretrain": {
        "gpu": "RTX 2080 Ti",
        "gpu_12gb": "RTX 3060",
        "gpu_24gb": "RTX 4090",
        "gpu_40gb": "A100 SXM 40GB",
        "large_24gb": "RTX 4090",
        "large_40gb": "A100 SXM 40GB",
        "large_80gb": "H100 SXM 80GB",
    },
    "summarization": {
        "gpu": "RTX 3070",
        "gpu_10gb": "RTX 3080",
        "gpu_16gb": "V100 SXM2 16GB",
        "gpu_24gb": "RTX 4090",
        "gpu_40gb": "A100 SXM 40GB",
        "mt5_10gb": "RTX 3080",
        "mt5_16gb": "V100 SXM2 16GB",
        "mt5_24gb": "RTX 4090",
        "mt5_40gb": "A100 SXM 40GB",
    },
    "transformer": {
        "gpu_small": "RTX 2080 Ti",
        "gpu_small_bf16": "RTX 3070",
        "gpu": "V100 SXM2 16GB",
        "gpu_bf16": "RTX 3080",
        "gpu_large": "V100 SXM2 32GB",
        "gpu_large_bf16": "RTX 4090",
    },
}


def profiles() -> Iterator[Training]:
    """Yield the training of each GPU profile, with the batch of the profile."""
    for config, cards in CARDS.items():
        document = yaml.safe_load((PROJECT / f"configs/{config}.yaml").read_text(encoding="utf-8"))
        effective = document["train"]["training"].get("effective_batch")
        for profile, card in cards.items():
            batch = document["profiles"][profile]["train"]["training"]
            whole = effective or batch["micro_batch"] * batch["accumulation"]
            overrides = {}
            if config == "summarization":
                overrides["model"] = "mt5_1_2b" if profile.startswith("mt5") else "t5_220m"
            yield Training(
                *(f"{config}, {profile}", config, card, batch.get("precision", "fp32")),
                *(batch["micro_batch"], whole),
                profile=profile,
                overrides=overrides,
            )


def predicted(training: Training) -> dict[str, Any]:
    """Return the published and the predicted numbers of a training as one row."""
    at_batch = whole = _fit(training, training.micro_batch)
    if training.effective_batch != training.micro_batch:
        whole = _fit(training, training.effective_batch)
    plain, thrifty = whole[~whole["gradient_checkpointing"]], whole[whole["gradient_checkpointing"]]
    first = at_batch.iloc[0]
    return asdict(training) | {
        "predicted_gb": (first["peak_bytes"] + first["context_bytes"]) / GB,
        "card_gb": first["capacity_bytes"] / GB,
        "fits": pd.notna(first["micro_batch"]),
        "predicted_largest": _largest(plain),
        "predicted_largest_checkpointing": _largest(thrifty),
        "samples_per_s": _number(first.get("samples_per_s")),
        "step_time_s": _number(first.get("step_time_s")),
        "minutes": [_minutes(first, end) for end in ("", "_high", "_low")],
    }


def _fit(training: Training, effective_batch: int) -> pd.DataFrame:
    """Return the predictions of a training in its precision, without sharding."""
    overrides = {
        **training.overrides,
        f"{training.stage}.training.effective_batch": effective_batch,
        f"{training.stage}.training.accumulation": None,
        f"{training.stage}.training.micro_batch": None,
    }
    return rp.fit(
        *(training.config, overrides),
        stage=training.stage,
        profile=training.profile,
        card=training.card,
        precision=training.precision,
    )


def _largest(rows: pd.DataFrame) -> int | None:
    sizes = rows["micro_batch"].dropna()
    return int(sizes.max()) if len(sizes) else None


def _number(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)


def _minutes(row: Any, end: str) -> float | None:
    speed, speed_then, hours = (
        _number(row.get(key)) for key in ("samples_per_s", f"samples_per_s{end}", "hours")
    )
    if speed is None or speed_then is None or hours is None:
        return None
    return 60 * hours * speed / speed_then


def write(
    file: Path,
    trainings: Sequence[Training],
    stored: Sequence[Mapping[str, Any]],
    predict: Callable[[Training], dict[str, Any]] = predicted,
) -> None:
    """Write the rows of trainings in their order: stored ones of equal trainings, and new ones.

    The file is written after each new row. ``commit`` of a row is that of its prediction.
    """
    wanted = [asdict(training) for training in trainings]
    found = [next((row for row in stored if each.items() <= row.items()), None) for each in wanted]
    for number, training in enumerate(trainings):
        found[number] = found[number] or {**predict(training), **_stamp()}
        rows = [row for row in found if row is not None]
        file.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


def _stamp() -> dict[str, str | None]:
    return {"commit": git_commit(), "raypipe": package_version("raypipe-runner")}


def main() -> None:
    """Predict everything that is not stored yet and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--fresh", action="store_true", help="predict stored trainings again")
    fresh = parser.parse_args().fresh
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name, trainings in (("published", PUBLISHED), ("profiles", list(profiles()))):
        file = RESULTS / f"{name}.json"
        stored = [] if fresh or not file.exists() else json.loads(file.read_text())["rows"]
        write(file, trainings, stored)


if __name__ == "__main__":
    main()
