"""What an engine is made of, as its thread sees it: a core that decides, a runner that computes, and what was settled about them.

Owns `EngineParts` and the two shapes `Core` and `Runner`, so that loop and manager can be driven by stand-ins. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..config import ContinuousBatchingConfig, EngineFacts, WorkloadHints
from ..core.plan import BatchPlan, StepResult
from ..core.request import RequestLimits
from ..grammar import Grammar
from ..messages import EngineStats, GenerateRequest, TokenChunk

if TYPE_CHECKING:
    from ..runtime.orders import Follower, Orders


class Ticket(Protocol):
    """A step that was handed to the device."""

    @property
    def plan(self) -> BatchPlan: ...


class Core(Protocol):
    """`core.engine_core.EngineCore`, or a stand-in."""

    @property
    def has_work(self) -> bool: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def weights_version(self) -> int: ...
    def add(self, source: GenerateRequest, now: float) -> None: ...
    def cancel(self, request_id: str, now: float) -> None: ...
    def plan(self, now: float) -> BatchPlan: ...
    def commit(self, plan: BatchPlan, result: StepResult, now: float) -> None: ...
    def fail_all(self, error: Exception, now: float) -> None: ...
    def cancel_all(self, error: Exception, now: float) -> None: ...
    def take_chunks(self) -> list[TokenChunk]: ...
    def stats(self) -> EngineStats: ...
    def set_weights_version(self, version: int, *, recompute: bool = False) -> None: ...
    def drop_cache(self) -> None: ...
    def track_names(self) -> None: ...
    def take_names(self) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]: ...


class Runner(Protocol):
    """`runtime.model_runner.ModelRunner`, or a stand-in."""

    @property
    def depth(self) -> int: ...
    def submit(self, plan: BatchPlan) -> Any: ...
    def collect(self, ticket: Any) -> StepResult: ...
    def warmup(self, progress: bool = False) -> None: ...
    def install(self) -> None: ...
    def restore(self) -> None: ...
    def reload(self) -> None: ...
    def close(self) -> None: ...


class Grammars(Protocol):
    """`runtime.grammar.GrammarCompiler`, or a stand-in."""

    def use(self, tokenizer: Any) -> None: ...
    def compile(self, grammar: Grammar) -> Any: ...
    def submit(self, grammar: Grammar) -> Future[Any]: ...


@dataclass(frozen=True, slots=True)
class EngineParts:
    """One engine, ready to run. `rebuild` makes the next one like it without trying the model again, where there is a short way."""

    core: Core
    runner: Runner
    facts: EngineFacts
    limits: RequestLimits
    rebuild: Callable[[], EngineParts] | None = None
    grammars: Grammars | None = None
    summary: str = ""  # what was chosen, in a line
    orders: Orders | None = None  # to the other ranks, where the model is divided and this is the leader
    follower: Follower | None = None  # where it is not: the parts are never asked to plan


Build = Callable[[Any, Any, ContinuousBatchingConfig, WorkloadHints], EngineParts]  # (model, generation_config, config, hints)
