"""The parts in order of value, each with its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu_parts import contenders, memory, pabbo, rates, runs, training
from benchmarks.gpu_parts.bench import Bench, Machine


@dataclass(frozen=True)
class Part:
    """A function that measures, and the time that it may take.

    Args:
        name: of the part, its file and its run directories.
        title: the heading of its section.
        function: stores rows as it measures them.
        seconds: the time limit; of all parts for one card together, 30 minutes.
        quick: the seconds that it is expected to take on an H100 or H200 with ``--quick``; of all
            parts for one card together, nine minutes.
        gpus: the GPUs that it needs.

    """

    name: str
    title: str
    function: Callable[[Bench], None]
    seconds: int
    quick: int
    gpus: int = 1

    def obstacle(self, machine: Machine) -> str | None:
        """Return why the part cannot run on a machine; None if it can."""
        if not machine.rehearsal and machine.gpus < self.gpus:
            return f"needs {self.gpus} GPUs; this machine has {machine.gpus}"
        return None

    def limit(self, minutes: float, *, quick: bool) -> float:
        """Return the limit of the part in seconds, in a call of ``minutes``.

        A part may take 1.5 times its expected duration; the next part may use what it leaves. A
        call of less than nine minutes keeps these limits, and does not begin the last parts.
        """
        return 1.5 * self.quick * max(1.0, minutes / 9) if quick else self.seconds


PARTS = (
    Part("rates", "Rates of the card", rates.rates, 60, 15),
    Part("loop", "raypipe's loop and the same by hand", contenders.loop, 180, 70),
    Part("mfu", "MFU of the medium language model", training.mfu, 120, 45),
    Part("out_of_memory", "Out of memory where it is predicted", memory.out_of_memory, 150, 45),
    Part("losses", "Losses of each precision next to fp32", training.losses, 240, 60),
    Part("telemetry", "NVML next to nvidia-smi", training.telemetry, 60, 20),
    Part("trainers", "Trainers on the same card", contenders.trainers, 180, 35),
    Part("quickstart", "The quickstart's training by the command", runs.quickstart, 100, 35),
    Part("pabbo", "PABBO on the card and on its CPUs", pabbo.pabbo, 60, 25),
    Part("predictions", "Predicted and measured memory and speed", memory.predictions, 270, 40),
    Part("t5", "T5 from scratch", runs.t5, 100, 30),
    Part("loader", "Loader processes", training.loader, 100, 35),
    Part("teleclass", "TELEClass", runs.teleclass, 100, 30),
    Part("sweep", "A sweep by the command", runs.sweep, 75, 35),
    Part("two_cards", "Two cards: DDP, FSDP, and one full card", runs.two_cards, 240, 120, gpus=2),
)
