"""Compiling the kernels: once, safely, and never an exception when it cannot be done."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cb_ray.runtime.native import Unavailable, compiler, load, loader

HERE = compiler.Torch(version=str(torch.__version__), root=Path(torch.__file__).parent)

STUB = """#!{python}
# A compiler that only makes the file it is asked for, and notes that it was called.
import pathlib, sys
pathlib.Path({log!r}).open("a").write(sys.argv[-1] + chr(10))
if any(word in sys.argv for word in {refused!r}):
    sys.exit("stub.cpp:1: error: that flag is unknown")
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("compiled")
"""


def stub_compiler(folder: Path, refused: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """(a compiler that does nothing at once, the file where it notes its calls)"""
    log, path = folder / "calls", folder / "c++"
    log.touch()
    path.write_text(STUB.format(python=sys.executable, log=str(log), refused=refused))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path, log


@pytest.fixture
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_library_is_compiled_once(tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start finds the file; another compiler is another build."""
    path, log = stub_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(path))
    built = compiler.library(HERE)
    assert built.is_relative_to(user_cache) and built.read_text() == "compiled"
    calls = log.read_text()
    assert compiler.library(HERE) == built and log.read_text() == calls
    os.utime(path, (1, 1))
    assert compiler.library(HERE) != built


def test_a_level_that_the_compiler_does_not_know_is_left_out(
    tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old compiler still gives the levels that it can."""
    if "avx512_bf16" not in compiler.LEVELS:
        pytest.skip("this architecture has one level")
    path, _ = stub_compiler(tmp_path, refused=("-mavx512bf16",))
    monkeypatch.setenv("CXX", str(path))
    assert compiler.library(HERE).exists()


def test_two_processes_that_start_together_compile_once(tmp_path: Path, user_cache: Path) -> None:
    """The second waits for the first and takes its library; nobody ever loads half a file."""
    path, log = stub_compiler(tmp_path)
    code = "from tests.runtime.test_native_build import HERE, compiler; print(compiler.library(HERE))"
    environment = {**os.environ, "CXX": str(path), "XDG_CACHE_HOME": str(user_cache)}
    root = Path(__file__).parents[2]
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=root, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = {process.communicate()[0] for process in both}
    assert len(answers) == 1 and [process.returncode for process in both] == [0, 0]
    assert (
        len(log.read_text().splitlines()) == len(compiler.LEVELS) + 8
    )  # seven files that are the same on every level, and the link


@pytest.mark.parametrize("cause", ["no compiler", "build error", "not a library"])
def test_no_kernels_is_one_log_line_and_a_reason(
    cause: str, tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong, `load` answers with the reason; the engine goes on with torch's own attention."""
    path, _ = stub_compiler(tmp_path, refused=("-O3",) if cause == "build error" else ())
    monkeypatch.setenv("CXX", "no-such-compiler" if cause == "no compiler" else str(path))
    with caplog.at_level(logging.WARNING, logger=loader.__name__):
        answer = load.__wrapped__()
    assert isinstance(answer, Unavailable)
    expected = {"no compiler": "install g++", "build error": "that flag is unknown", "not a library": "cb_ray_native.so"}
    assert expected[cause] in answer.reason
    assert len(caplog.records) == 1 and answer.reason in caplog.text
