"""What the pool's benchmarks do inside an Engine replica: give it its cores, and stop its steps when told to.

Owns the `load` of benchmarked replicas and the functions that are run in them by their actor handle. The engine is the ordinary
one; the only addition is a gate in front of its model, open unless a benchmark closes it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from ...serving.engine_deployment import EngineSpec, LoadedEngine

_STEPS = threading.Event()
_STEPS.set()


def load(spec: EngineSpec, cores: Sequence[int]) -> LoadedEngine:
    """The engine of `spec`, in a process whose threads run on `cores` alone (none: wherever they like)."""
    from ...serving.engine_loading import load_engine

    bind(cores)
    loaded = load_engine(spec.model, spec.engine)
    model: Any = getattr(loaded.engine, "model")  # noqa: B009  (EngineLike does not promise one)
    model.register_forward_pre_hook(lambda *_: _STEPS.wait() and None)
    return loaded


def bind(cores: Sequence[int]) -> None:
    """Every thread of this process, and those to come, on `cores`. That they give way to others is the engine's own doing."""
    if cores:
        for thread in map(int, os.listdir("/proc/self/task")):
            os.sched_setaffinity(thread, cores)


def pid(actor: Any) -> int:
    """Of the replica in which this is run."""
    return os.getpid()


def hang(actor: Any) -> None:
    """The replica's next step never ends."""
    _STEPS.clear()
