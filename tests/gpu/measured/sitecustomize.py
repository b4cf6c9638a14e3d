"""Measure raypipe's lines in this process, as Python starts: put this folder on PYTHONPATH.

Python imports it in every process, also in Ray's. ``RAYPIPE_COVERAGE`` names the data files. They
are written several times per second, since Ray kills processes.
"""

import os

if "RAYPIPE_COVERAGE" in os.environ:
    import threading

    import coverage

    measuring = coverage.Coverage(
        data_file=os.environ["RAYPIPE_COVERAGE"], data_suffix=True, config_file=False,
        include=["*/raypipe/*"], messages=False,
    )  # fmt: skip
    measuring.start()

    ended = threading.Event()

    def write() -> None:
        """Write the data several times per second, and at the end of the process."""
        main = threading.main_thread()
        while main.is_alive() and not ended.wait(0.2):
            measuring.save()
        measuring.save()

    writing = threading.Thread(target=write, name="coverage", daemon=False)
    writing.start()

    def finish() -> None:
        """Write the last data, for a process that ends without ending its threads."""
        ended.set()
        writing.join()
        measuring.stop()
        measuring.save()
