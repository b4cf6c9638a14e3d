"""Run a command and print its resources: LOG COMMAND...; its output goes to the log.

CPU time is the larger of two sums, since each leaves something out. One is of the last samples of
all processes, which miss up to 50 ms of each. The other is what the kernel counts for processes
that were waited for; the raylet does not wait for its own.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from raypipe.process_tree import adopt_orphans

#: seconds between samples, and those in which processes that a command left may end
SAMPLE_S, LEFT_S = 0.05, 10.0

log, *command = sys.argv[1:]
adopt_orphans()
me, peak, end, status = psutil.Process(), 0, 0.0, None
begin, cpu, own = time.perf_counter(), dict[int, float](), [(time.time(), 0.0)]
with Path(log).open("w") as output:
    process = psutil.Popen(command, stdout=output, stderr=output)
    # Ray's processes end later
    while status is None or (me.children() and time.perf_counter() < end + LEFT_S):
        time.sleep(SAMPLE_S)
        for each in me.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                cpu[each.pid] = sum(each.cpu_times()[:2])  # user and system
        own.append((time.time(), cpu.get(process.pid, 0.0)))
        if status is not None:
            os.waitpid(-1, os.WNOHANG)
        elif process.status() == psutil.STATUS_ZOMBIE:
            end, status = time.perf_counter(), process.wait()
        else:
            text = Path(f"/proc/{process.pid}/status").read_text()
            peak = max([peak, *map(int, re.findall(r"VmHWM:\s*(\d+)", text))])
tree = max(sum(cpu.values()), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]))
found = {"cpu_s": cpu[process.pid], "tree_cpu_s": tree, "peak_bytes": 1024 * peak}
print(json.dumps({"wall_s": end - begin, **found, "cpu_by_time": own}))
sys.exit(status)
