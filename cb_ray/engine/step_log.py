"""What an engine's steps did and how long they took, as lines of JSON that `cb-ray plan fit` reads. Owns `StepLog`.

Four counts and a time per step, some 60 bytes; written by the engine thread, in large pieces.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..core.plan import BatchPlan, StepWork
from ..errors import ConfigError

_STEPS_AT_ONCE = 200  # steps between two writes


class StepLog:
    """A file of its own for this process in `directory`. Raises ConfigError when it cannot be written there."""

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory).expanduser() / f"steps-{os.getpid()}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"engine.step_log must be a directory that can be written to: {error}", "engine.step_log"
            ) from error
        self.path = path
        self._lines: list[str] = []

    def add(self, plan: BatchPlan, seconds: float) -> None:
        query, samples, kv, pairs = StepWork.of(plan.rows)
        self._lines.append(json.dumps({"query": query, "samples": samples, "kv": kv, "pairs": pairs, "s": round(seconds, 7)}))
        if len(self._lines) >= _STEPS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write what was held back."""
        self._file.write("".join(f"{line}\n" for line in self._lines))
        self._file.flush()
        self._lines.clear()
