"""Directories that are made once, published whole and noticed when damaged: the user's cache of converted models.

Owns the entries, their lock files and manifests. Knows nothing of models: what goes into an entry is the
business of the function that makes it.

    root/KEY.lock          held while KEY is made, by one process on the machine at a time
    root/.KEY.x7f2/entry   where it is made; left behind by a process that died, swept by the next one
    root/KEY/              the finished entry, renamed into place; its manifest lists every file with size and digest
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ModelSourceError
from ..user_cache import alone

logger = logging.getLogger(__name__)

MANIFEST = "cb-ray-manifest.json"
_REREAD_BYTES = 16 * 2**20  # digests of larger files are checked by whoever doubts them, not at every start


def cached_directory(root: Path, key: str, make: Callable[[Path], None]) -> Path:
    """The directory `root/key`, made by `make(empty_directory)` unless a whole one is there already.

    Any number of processes may ask at once: one makes it, the others wait for it. Whatever `make` raises passes through and
    leaves nothing behind. Raises ModelSourceError where the cache cannot be written.
    """
    entry = root / key
    if is_whole(entry):
        return entry
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / f"{key}.lock").touch()
    except OSError as error:
        raise ModelSourceError(
            f"the model cache {root} cannot be written ({error.strerror}); point XDG_CACHE_HOME or cache_dir to a place that can"
        ) from error
    with alone(root / f"{key}.lock"):
        if not is_whole(entry):  # or else somebody made it while this process waited
            _make(root, key, make)
    return entry


def _make(root: Path, key: str, make: Callable[[Path], None]) -> None:
    entry = root / key
    if entry.exists():
        logger.warning("%s is damaged (its files are not those of its manifest); making it again", entry)
        shutil.rmtree(entry)
    for stale in root.glob(f".{key}.*"):
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(dir=root, prefix=f".{key}.") as scratch:
        staging = Path(scratch) / "entry"
        staging.mkdir()
        make(staging)
        _seal(staging)
        staging.rename(entry)


def _seal(directory: Path) -> None:
    """Write the manifest and bring every byte to the disk, so that a rename never publishes what a power cut could undo."""
    files = {path.name: _fingerprint(path) for path in sorted(directory.iterdir())}
    (directory / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n")
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def is_whole(directory: Path) -> bool:
    """Whether every file of the manifest is there with its size and, up to 16 MiB, with its digest."""
    try:
        files: dict[str, dict[str, Any]] = json.loads((directory / MANIFEST).read_text())["files"]
        return bool(files) and all(_is_as_listed(directory / name, listed) for name, listed in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _is_as_listed(path: Path, listed: dict[str, Any]) -> bool:
    size = path.stat().st_size
    return size == listed["bytes"] and (size > _REREAD_BYTES or _fingerprint(path) == listed)


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's contents, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
