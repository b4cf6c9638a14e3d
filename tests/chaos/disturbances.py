"""What can go wrong with a run, done to a real one.

Each disturbance starts a command and does its worst; False says that there was nothing to disturb.
All draws come from the round's generator.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from tests.chaos import surroundings
from tests.chaos.scene import LONGEST_S, Scene

Disturbance = Callable[[Scene], bool | None]


# processes


def driver_killed(scene: Scene) -> None:
    """SIGKILL to the command."""
    scene.start()
    scene.die()


def driver_terminated(scene: Scene) -> None:
    """SIGTERM to the command: a batch system's time limit."""
    scene.start()
    scene.process.terminate()
    scene.end(-signal.SIGTERM)  # before it listens to signals


def interrupted_twice(scene: Scene) -> None:
    """Ctrl-C, and once more."""
    scene.start()
    scene.process.send_signal(signal.SIGINT)
    time.sleep(scene.rng.uniform(0, 1))
    scene.process.send_signal(signal.SIGINT)


def driver_frozen(scene: Scene) -> None:
    """The command stands still for some seconds."""
    scene.start()
    scene.process.send_signal(signal.SIGSTOP)
    time.sleep(scene.rng.uniform(1, 5))
    scene.process.send_signal(signal.SIGCONT)


def second_driver(scene: Scene) -> None:
    """Another command on the same run directory: it is refused while the first lives."""
    scene.start()
    second = scene.another()
    output, _ = second.communicate()
    if scene.process.poll() is None:
        assert second.returncode == 2, output
        assert "is writing it" in output, output


def process_killed(scene: Scene, title: str, within_s: float = LONGEST_S) -> bool:
    """SIGKILL to a process of the command, once there is one with such a title."""
    scene.start(within_s=within_s)
    while not (killed := scene.kill(title)) and scene.process.poll() is None:
        scene.wait(0.1)
    return killed


# nodes


def node_lost(scene: Scene, *, is_head: bool) -> None:
    """A whole node of the cluster goes without a word; after the head, the next one is new."""
    with surroundings.two_nodes(scene.name) as cluster:
        scene.start(cluster.address)
        lost = cluster.head_node if is_head else cluster.list_all_nodes()[-1]
        cluster.remove_node(lost, allow_graceful=False)
        further = [2] if is_head else []  # it may just have looked for the head
        scene.end(*further)


def spot_node(scene: Scene) -> None:
    """A node comes, is used, and goes."""
    with surroundings.two_nodes(scene.name) as cluster:
        scene.start(cluster.address)
        node = surroundings.add_node(cluster)
        scene.wait(scene.rng.uniform(3, 15))
        cluster.remove_node(node, allow_graceful=False)
        scene.end()


def store_full(scene: Scene) -> None:
    """The object stores are full of somebody else's objects."""
    with (
        surroundings.two_nodes(scene.name) as cluster,
        surroundings.store_filled(cluster, scene.name),
    ):
        scene.start(cluster.address)
        scene.end()


# files


def disk_full(scene: Scene) -> bool:
    """Not a byte can be written for some seconds, in the run directory and in the cache."""
    if not scene.home.is_mount():
        return False
    scene.start()
    with surroundings.full(scene.home):
        scene.wait(scene.rng.uniform(1, 20))
    return True


def directory_read_only(scene: Scene) -> bool:
    """The run directory cannot be written when a command starts: it says so and does nothing."""
    if not scene.home.is_mount():
        return False
    scene.start()
    scene.die()
    with surroundings.read_only(scene.home):
        refused = scene.another()
        output, _ = refused.communicate()
    if "nothing to do" in output:
        return False
    assert refused.returncode == 2, output
    assert "read-only" in output.lower(), output
    return True


def file_cut(scene: Scene, pattern: str, *, is_dead: bool = True) -> bool:
    """A file is cut, of a dead command or while it runs; of checkpoints, one of the newest."""
    scene.start()
    while not any(scene.home.glob(pattern)) and scene.process.poll() is None:
        scene.wait(0.1)
    if is_dead:
        scene.die()
    found = sorted(scene.home.glob(pattern))
    if found and "step_" in pattern:
        newest = max(path.parent.name for path in found)
        found = [path for path in found if path.parent.name == newest]
    if not found:
        return False
    chosen = scene.rng.choice(found)
    with suppress(FileNotFoundError):
        content = chosen.read_bytes()
        chosen.write_bytes(content[: scene.rng.randrange(len(content))] if content else b"")
    return True


def ledger_torn(scene: Scene) -> bool:
    """The last line of the ledger of a dead command is half written."""
    scene.start()
    scene.die()
    segments = sorted(scene.folder.glob("ledger/*.jsonl"))
    if not segments or not (content := segments[-1].read_bytes()):
        return False
    last = content.rstrip(b"\n").rpartition(b"\n")[2]
    segments[-1].write_bytes(content[: -scene.rng.randint(1, len(last))])
    return True


# the clock


def clock_set_back(scene: Scene) -> bool:
    """The time of day goes back by an hour for every process of the command, and comes again."""
    compiler = shutil.which("cc")
    if compiler is None:
        return False
    set_back, environment = surroundings.clock(scene.home, compiler)
    scene.start(**environment)
    set_back(3600)
    scene.wait(scene.rng.uniform(3, 15))
    set_back(0)
    return True


ALL: dict[str, Disturbance] = {
    "driver_killed": driver_killed,
    "driver_terminated": driver_terminated,
    "interrupted_twice": interrupted_twice,
    "driver_frozen": driver_frozen,
    "second_driver": second_driver,
    # training comes first and is short
    "worker_killed": partial(process_killed, title="^ray::(train_|ImplicitFunc)", within_s=15),
    "task_killed": partial(process_killed, title="^ray::run_in_worker"),
    "raylet_killed": partial(process_killed, title="raylet/raylet"),
    "head_killed": partial(process_killed, title="gcs_server"),
    "node_lost": partial(node_lost, is_head=False),
    "head_node_lost": partial(node_lost, is_head=True),
    "spot_node": spot_node,
    "store_full": store_full,
    "disk_full": disk_full,
    "directory_read_only": directory_read_only,
    "checkpoint_cut": partial(file_cut, pattern="run/checkpoints/*/step_*/*"),
    "table_cut": partial(file_cut, pattern="run/results/*/data.parquet"),
    "ledger_torn": ledger_torn,
    "cache_cut": partial(file_cut, pattern="cache/**/*.*", is_dead=False),
    "clock_set_back": clock_set_back,
}
