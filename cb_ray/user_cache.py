"""The user's cache directory, and a lock by which processes take turns in it.

Owns where fetched models and compiled kernels are kept. Knows the standard library only, and nothing of what is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path


def user_cache_dir() -> Path:
    """`cb-ray` under XDG_CACHE_HOME where that is set to an absolute path, else under `~/.cache`. It need not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "cb-ray"


@contextlib.contextmanager
def alone(lock: Path) -> Generator[None]:
    """Hold `lock`, a file made if need be, waiting for it in the kernel. It is let go of when its holder dies, however it dies.

    Raises OSError where the file cannot be made. It stays behind: to remove it would let two processes hold two files of one name.
    """
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
