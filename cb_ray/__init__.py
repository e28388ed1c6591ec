"""Continuous-batching LLM inference with transformers' API, in one process or as a Ray Serve application.

Owns the public names, imported lazily, so that `import cb_ray.core` and `import cb_ray.routing` need neither torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "ContinuousBatchingConfig": "config",
    "CompileConfig": "config",
    "ContinuousBatchingManager": "engine.manager",
    "GenerateRequest": "messages",
    "GenerationOutput": "messages",
    "Grammar": "grammar",
    "RemoteManager": "serving.remote_manager",
    "RequestStatus": "messages",
    "SamplingParams": "messages",
    "TokenChunk": "messages",
    "Usage": "messages",
    "WorkloadHints": "config",
    "attach": "engine.generate",
    "continuous_batching_context_manager": "engine.generate",
    "generate_batch": "engine.generate",
    "init_continuous_batching": "engine.generate",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from .config import CompileConfig, ContinuousBatchingConfig, WorkloadHints
    from .engine.generate import attach, continuous_batching_context_manager, generate_batch, init_continuous_batching
    from .engine.manager import ContinuousBatchingManager
    from .grammar import Grammar
    from .messages import GenerateRequest, GenerationOutput, RequestStatus, SamplingParams, TokenChunk, Usage
    from .serving.remote_manager import RemoteManager


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
