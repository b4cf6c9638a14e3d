"""Compile the stand-in libraries for a CUDA wheel of torch: CUDA, cuBLAS, NCCL, and NVML.

Where they cannot be built, the test is skipped with what is missing.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent
PROJECT = SOURCES.parents[2]
BUILDS = PROJECT / "build" / "gpu-rig"
CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"

#: compiled into the CUDA library; it replaces the runtime, cuBLAS and NCCL of the wheel, too
_PARTS = ("machine", "memory", "runtime", "graphs", "blas", "nccl", "driver")
#: libraries of torch whose undefined symbols the CUDA library has to define
_USERS = ("torch_cuda", "c10_cuda", "torch_python", "torch_cuda_linalg")
_SYMBOL = re.compile(r"(__cuda|cuda|cublas|nccl)\w+$")
#: stubs that count a matrix product
_PRODUCT = re.compile(r"[gG]?emm|gemv|atmul|[dD]ot|axpy|nrm|trsm|getr")
_DECLARED = re.compile(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(")
_RENAMED = re.compile(r"#define\s+(cu[A-Z]\w+)\s+(?:__CUDA_API_\w+\()?(cu[A-Z]\w+)")
_COMPILE = ("gcc", "-O1", "-g", "-fPIC", "-Wall")
_FIND_TORCH = """
import importlib.metadata, importlib.util, json
find = importlib.util.find_spec
print(json.dumps([importlib.metadata.version("torch"), *(
    list(find(name).submodule_search_locations) if find(name) else []
    for name in ("torch", "nvidia")
)]))
"""


def cuda_libraries(python: str) -> Path:
    """Return the folder of all libraries for the CUDA wheel of an interpreter, built once."""
    version, (torch, *_), nvidia = json.loads(_output(python, "-c", _FIND_TORCH))
    headers = [path for place in nvidia for path in Path(place).glob("cu1*/include/cuda.h")]
    if not headers:
        pytest.skip(f"{python}: torch {version} is not a CUDA wheel with headers")
    users = [Path(torch, "lib", f"lib{name}.so") for name in _USERS]

    def build(folder: Path) -> None:
        flags = "import torch; print(torch._C._cuda_getArchFlags())"
        architectures = _output(python, "-c", flags).strip()
        _build_cuda(folder, headers[0], filter(Path.exists, users), architectures)
        _build_nvml(folder)

    return _built(f"torch-{version}", build)


def nvml_library() -> Path:
    """Return the folder of the NVML library alone, which needs no CUDA wheel."""
    return _built("nvml", _build_nvml)


def _built(name: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of this name and of these sources; fill it first if there is none."""
    sources = sorted(path for path in SOURCES.rglob("*") if path.suffix in (".c", ".h", ".py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    target = BUILDS / f"{name}-{digest[:16]}"
    if target.exists():
        return target
    if missing := [tool for tool in ("gcc", "nm") if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(missing)} not found")
    BUILDS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILDS) as work:
        folder = Path(work) / "built"
        folder.mkdir()
        build(folder)
        if not target.exists():  # another process may have been faster
            folder.rename(target)
    return target


def _build_cuda(folder: Path, header: Path, users: Iterable[Path], architectures: str) -> None:
    include = ("-I", str(SOURCES / "include"), "-I", str(header.parent))
    definition = f'-DRIG_ARCHITECTURES="{architectures}"'
    objects = [folder / f"{part}.o" for part in _PARTS]
    for part, made in zip(_PARTS, objects, strict=True):
        _output(*_COMPILE, *include, definition, "-c", str(SOURCES / f"{part}.c"), "-o", str(made))
    defined = {name for made in objects for name in _symbols("--defined-only", made)}
    used = {name for user in users for name in _symbols("--undefined-only", "-D", user)}
    wanted = {name for name in used if _SYMBOL.match(name)} | _of_driver(header.read_text())
    stubs = folder / "stubs.c"
    stubs.write_text(_stubs(sorted(wanted - defined)))
    library = ("-shared", f"-Wl,-soname,{CUDA}", "-o", str(folder / CUDA))
    _output(*_COMPILE, *library, *map(str, objects), str(stubs), "-ldl", "-lpthread")


def _build_nvml(folder: Path) -> None:
    # without a name of its own: in a process that loads it by its path, NVML stays missing
    library = ("-shared", "-o", str(folder / NVML))
    _output(*_COMPILE, *library, str(SOURCES / "nvml.c"), str(SOURCES / "machine.c"))


def _of_driver(header: str) -> set[str]:
    """Return the functions that cuda.h declares, under their names and versioned names."""
    renamed = {name for pair in _RENAMED.findall(header) for name in pair}
    return {*_DECLARED.findall(header), *renamed}


def _stubs(names: Iterable[str]) -> str:
    """Return C functions that succeed and do nothing; those of matrix products are counted."""
    product = "{ __sync_fetch_and_add(&rig_counters.gemms, 1); count_launch(); return 0; }"
    lines = ["extern struct { long launches, gemms; } rig_counters;", "void count_launch(void);"]
    for name in names:
        # blas.c has the product of cublasLt; its other functions with such names describe one
        is_blas = name.startswith("cublas") and not name.startswith("cublasLt")
        counted = is_blas and _PRODUCT.search(name)
        lines.append(f"int {name}(void) {product if counted else '{ return 0; }'}")
    return "\n".join(lines) + "\n"


def _symbols(*arguments: str | Path) -> set[str]:
    lines = _output("nm", *map(str, arguments)).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.strip()}


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stdout
