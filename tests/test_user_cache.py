"""The user's cache: where it is, and that processes take turns in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cb_ray.user_cache import alone, user_cache_dir


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_CACHE_HOME where it is an absolute path, ~/.cache where it is not, as the XDG specification has it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert user_cache_dir() == tmp_path / "elsewhere" / "cb-ray"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache_dir() == tmp_path / ".cache" / "cb-ray"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_dir() == tmp_path / ".cache" / "cb-ray"


HOLDER = """
import os, sys
from pathlib import Path
from cb_ray.user_cache import alone
with alone(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
    os._exit(1)  # no clean-up: as if it had been killed
"""


def test_a_lock_falls_with_its_holder(tmp_path: Path) -> None:
    """A process that is killed while it converts must not keep everybody else waiting for ever."""
    lock = tmp_path / "key.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    waiter = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    holder.communicate("die\n", timeout=60)
    assert waiter.communicate("go on\n", timeout=60)[0] == "held\n"
    with alone(lock):
        assert lock.exists()
