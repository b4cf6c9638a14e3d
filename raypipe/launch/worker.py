"""Log and number of threads of a training worker's process."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raypipe.launch.output import redirected
from raypipe.redaction import LogFormatter, without_credentials
from raypipe.training.job import TrainingJob


@contextmanager
def logged(job: TrainingJob, rank: int) -> Iterator[None]:
    """Write what this process prints and logs to the log of a training, which only then exists.

    On an object store the log is written at the end of the job.
    """
    path = job.run_dir.log(job.trial_id if rank == 0 else f"{job.trial_id}-{rank}")
    local = job.run_dir.is_local
    if local:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644) if local else -1
    with tempfile.TemporaryFile("ab+") as temporary:
        target = descriptor if local else temporary.fileno()
        begin = os.fstat(target).st_size
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
        try:
            with redirected(target):
                yield
        finally:
            written = os.pread(target, os.fstat(target).st_size - begin, begin)
            shown = without_credentials(written.decode(errors="replace")).encode()
            if local:
                if shown != written:
                    os.ftruncate(target, begin)
                    os.write(target, shown)
                os.close(target)
                if not begin and not shown:
                    Path(path).unlink(missing_ok=True)
            elif shown:
                earlier = job.run_dir.read(path) if job.run_dir.exists(path) else b""
                job.run_dir.write(path, earlier + shown)


def compute_with(threads: int) -> None:
    """Set the number of intra-op threads of the calling thread, which trains."""
    import torch

    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
