"""Rates of the card, and of the host that launches its kernels: what everything else is up to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median

import torch

from benchmarks.gpu_parts.bench import Bench, Row
from raypipe.cards import peak_memory
from raypipe.hardware import Precision
from raypipe.training.data_sheets import peak_flops

_DTYPES: Mapping[Precision, torch.dtype] = {
    "bf16": torch.bfloat16, "fp16": torch.float16,
    "tf32": torch.float32, "fp32": torch.float32,
}  # fmt: skip


def rates(bench: Bench) -> None:
    """Measure the memory of a context, products by precision, copies, and kernel launches."""
    device = torch.device("cpu" if bench.machine.rehearsal else "cuda")
    if device.type == "cuda":
        bench.measure("context", _context)
    size = bench.pick(8192, 8192, 256)
    cpu: tuple[Precision, ...] = ("fp32",)
    for name in _DTYPES if device.type == "cuda" else cpu:
        bench.measure(name, partial(_product, name, size, device))
    for key, copy in _copies(bench.pick(2**30, 2**30, 2**20), device):
        bench.measure(key, copy)
    bench.measure("launches", lambda: _launches(device))


def _context() -> Row:
    """Return the memory of a process on the card outside torch's allocator, after a matrix product.

    Nobody else may use the card meanwhile.
    """
    product = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    product @ product
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "context_bytes": total - free - torch.cuda.memory_reserved(),
        "predicted_context_bytes": peak_memory.outside(1),
        "capacity_bytes": total,
    }


def _product(name: Precision, size: int, device: torch.device) -> Row:
    """Return the FLOP/s of a product of square matrices, next to that of the data sheet."""
    dtype = _DTYPES[name]
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = _seconds(lambda: left @ right, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    rate = 2 * size**3 / seconds
    peak = peak_flops(torch.cuda.get_device_name(), name) if device.type == "cuda" else None
    sheet = {} if peak is None else {"data_sheet": peak / 1e12, "share": rate / peak}
    return {"rate": rate / 1e12, "unit": "TFLOP/s", **sheet}


def _copies(size: int, device: torch.device) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield copies of a number of bytes: within the memory of the card, and to it."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield "copy", lambda: {
        "rate": 2e-9 * size / _seconds(lambda: target.copy_(source), device), "unit": "GB/s"
    }  # fmt: skip
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    yield (
        "copy to the card",
        lambda: {
            "rate": 1e-9 * size / _seconds(lambda: target.copy_(host, non_blocking=True), device),
            "unit": "GB/s",
        },
    )


def _launches(device: torch.device, number: int = 3000) -> Row:
    """Return the kernels per second that one thread of the host launches."""
    small = torch.zeros(16, device=device)

    def launch() -> None:
        for _ in range(number):
            small.add_(1)

    return {"rate": number / _seconds(launch, device, 3), "unit": "kernels/s"}


def _seconds(call: Callable[[], object], device: torch.device, repeats: int = 8) -> float:
    """Return the median time of a call, of which a GPU runs four at once; the first is apart."""
    on_gpu, times = device.type == "cuda", []
    calls = 4 if on_gpu else 1
    for _ in range(repeats):
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) / calls)
    return median(times[1:])
