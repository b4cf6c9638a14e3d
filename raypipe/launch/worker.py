"""Log file and number of threads of a training worker's process."""

from __future__ import annotations

import logging
from pathlib import Path

from raypipe.redaction import LogFormatter
from raypipe.training.job import TrainingJob


def log_to_file(job: TrainingJob, rank: int) -> None:
    """Write this process's log to a file of the job and rank, if the run directory is local."""
    if job.run_dir.is_local:
        Path(job.run_dir.logs).mkdir(parents=True, exist_ok=True)
        name = f"{job.trial_id.replace('/', '-')}-{rank}.log"
        handler = logging.FileHandler(f"{job.run_dir.logs}/{name}")
        handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)


def compute_with(threads: int) -> None:
    """Set the number of intra-op threads of the calling thread, which trains."""
    import torch

    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
