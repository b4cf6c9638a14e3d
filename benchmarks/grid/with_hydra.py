"""Hydra's multirun: ``--multirun C=0.1,1,10 seed=0,1,2,3,4 hydra/launcher=joblib``."""

import json
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

from benchmarks.grid.score import score


@dataclass
class Config:
    """The arguments."""

    C: float = 1.0
    seed: int = 0


ConfigStore.instance().store("config", Config)


@hydra.main(version_base=None, config_name="config")
def main(config: Config) -> None:
    """Write the value of one combination to its folder."""
    place = Path(HydraConfig.get().runtime.output_dir) / "value.json"
    place.write_text(
        json.dumps({"C": config.C, "seed": config.seed, **score(config.C, config.seed)})
    )


if __name__ == "__main__":
    main()
