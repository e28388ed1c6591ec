"""Compiles the kernels: once per machine setup, into the user's cache, safely when several processes start at the same time.

Owns the compiler's flags, the cache's file names and the lock. May not know torch beyond where its headers and libraries lie.

How it is built, and why so:

- Kernels include no torch header. One file is compiled once per dispatch level with that level's machine flags, so the library
  runs on any machine of the architecture and picks its level when loaded. A level that the compiler does not know is left out.
- The ops are written against torch's *stable C ABI* (`torch/csrc/stable`): that file compiles in about 2 s, against 5 s with
  ATen's smallest headers and 25 s with `torch/extension.h`, and a call costs 2.8 us from Python against 2.1 us. A plain C
  function behind `ctypes` and a Python `custom_op` would compile as fast, and cost ten times as much a call.
- The compiler is called directly: `torch.utils.cpp_extension` imports setuptools and ninja and gains nothing here.
- Everything together is some 25 s of one core, shared by as many processes as there are cores; found in the cache, it loads in 10 ms.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...user_cache import alone, user_cache_dir

HERE = Path(__file__).parent

# GCC 12's own AVX-512 headers set off its two "uninitialized" warnings, thousands of times.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Wno-unknown-warning-option", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
LEVELS: dict[str, tuple[str, ...]] = {"portable": ()}
if platform.machine() in ("x86_64", "AMD64"):
    LEVELS |= {"avx2": _AVX2, "avx512": _AVX512, "avx512_bf16": (*_AVX512, "-mavx512bf16")}

TORCH_FLOOR = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # 2.11: newer torches keep what this one promised


class BuildError(Exception):
    """The kernels could not be compiled; the message is the reason, for a log line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """Where torch lies, and which one it is."""

    version: str
    root: Path


def library(torch: Torch) -> Path:
    """Path of the compiled library, compiled now if it is not in the cache. Raises BuildError."""
    shipped = shipped_library()
    if shipped.exists():
        return shipped
    compiler = find_compiler()
    folder = user_cache_dir() / "native" / build_key(torch, compiler)
    built = folder / "cb_ray_native.so"
    if built.exists():
        return built
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder / "lock"):
            if not built.exists():
                compile_into(built, torch, compiler)
    except OSError as error:
        raise BuildError(f"cannot write to {folder}: {error}") from error
    return built


def shipped_library() -> Path:
    """Where an image or a wheel may carry a library built beforehand: it counts only for exactly these sources."""
    return HERE / f"native-{platform.machine()}-{source_hash()}.so"


def ship(torch: Torch) -> Path:
    """The library beside its sources, compiled now if it is not there: for images and wheels. Raises BuildError, OSError."""
    shipped = shipped_library()
    if not shipped.exists():
        compile_into(shipped, torch, find_compiler())
    return shipped


def sources() -> list[Path]:
    """All C++ files, in a fixed order."""
    return sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])


def source_hash() -> str:
    """Names what the library is made of: its sources and flags."""
    digest = hashlib.sha256(repr((FLAGS, LEVELS, TORCH_FLOOR)).encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build_key(torch: Torch, compiler: Path) -> str:
    """Names a build. The processor is not part of it: the library holds every level and chooses when loaded."""
    real = compiler.resolve()
    stat = real.stat()
    parts = (torch.version, str(real), stat.st_size, stat.st_mtime_ns, platform.machine(), *platform.libc_ver())
    return f"{source_hash()}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"


def find_compiler() -> Path:
    """`$CXX`, or the first of c++, g++ and clang++ on the path. Raises BuildError."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in wanted:
        if found := shutil.which(name):
            return Path(found)
    raise BuildError(f"no C++ compiler (looked for {', '.join(wanted)}); install g++ to have native attention")


def compile_into(built: Path, torch: Torch, compiler: Path) -> None:
    """Compile and link, then move the whole library into place at once. Raises BuildError."""
    with tempfile.TemporaryDirectory(dir=built.parent) as name:
        folder = Path(name)
        common = [str(compiler), *FLAGS]
        headers = ["-isystem", str(torch.root / "include"), TORCH_FLOOR]
        orders = {name: [*common, "-c", str(HERE / f"{name}.cpp")] for name in ("plan", "linear_plan", "pool")}
        orders |= {
            name: [*common, *headers, "-c", str(HERE / f"{name}.cpp")]
            for name in ("paged_attention", "linear_ops", "layer_ops", "choose_ops")
        }
        needed = (*orders, "portable")
        for level, flags in LEVELS.items():
            orders[level] = [*common, *flags, f"-DLEVEL={level}", "-c", str(HERE / "kernels.cpp")]
        failures = _run({key: [*order, "-o", str(folder / f"{key}.o")] for key, order in orders.items()})
        for key in needed:
            if key in failures:
                raise BuildError(f"{compiler} could not compile {key}: {failures[key]}")
        levels = [level for level in LEVELS if level not in failures]
        listed = "-DLEVELS(X)=" + " ".join(f"X({level})" for level in levels)
        objects = [str(folder / f"{key}.o") for key in orders if key not in failures]
        library = folder / "library.so"
        link = [*common, listed, str(HERE / "levels.cpp"), *objects, "-shared", "-o", str(library)]
        link += ["-pthread", f"-L{torch.root / 'lib'}", "-ltorch_cpu", "-lc10"]
        link += ["-Wl,-z,defs"] if platform.system() == "Linux" else []  # a missing symbol is an error here, not when loaded
        if error := _run({"library": link}).get("library"):
            raise BuildError(f"{compiler} could not link: {error}")
        os.replace(library, built)


def _run(orders: dict[str, Sequence[str]]) -> dict[str, str]:
    """Run compilers, as many at a time as there are cores; the first error line of each that failed."""
    waiting, failures = list(orders.items()), {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    while waiting:
        batch, waiting = waiting[:cores], waiting[cores:]
        running = [(key, subprocess.Popen(order, stderr=subprocess.PIPE, text=True, errors="replace")) for key, order in batch]
        for key, process in running:
            _, errors = process.communicate()
            if process.returncode:
                lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines()[-1:]
                failures[key] = lines[0] if lines else f"exit status {process.returncode}"
    return failures
