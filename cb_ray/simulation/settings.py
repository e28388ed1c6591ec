"""What a simulated pool is made of and what befalls it. Owns `PoolPlan`, `Hops`, `Clients`, `Failure` and `WeightUpdate`.

Plain data with production's defaults. Times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import ConfigError
from ..routing.autoscaling import ScaleTargets
from .engine_shape import EngineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Hops:
    """How long messages travel. `door_s`: from a client's call until the Board is asked (HTTP, tokenizing, one RPC)."""

    door_s: float = 0.003
    grant_s: float = 0.002  # from the Board's grant until the engine has the request
    answer_s: float = 0.002  # from the engine's token until the client has it
    release_s: float = 0.002  # from a stream's end until the Board knows
    beat_s: float = 0.001  # one way


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """What a refused client does: come back when it was told to, at most `max_returns` times, or (0) leave.

    `whole_seconds`: it was told by HTTP, whose Retry-After knows no fractions.
    """

    max_returns: int = 0
    whole_seconds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """At `at_s` a replica dies with all it has; `after_s` later Serve has noticed and starts another."""

    at_s: float
    replica: int = 0  # the n-th oldest of those that serve then
    after_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """From `at_s` on, one replica after the other takes no new requests, stands still and loads for `load_s`, and goes on."""

    at_s: float
    load_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A pool: how many replicas of what shape, routed how, scaled how, and what happens to it."""

    shape: EngineShape
    replicas: int = 1
    policy: str = "prefix_aware"
    max_queue_size: int = 0
    index_max_bytes: int = 256 * 2**20
    scaling: ScaleTargets | None = None  # None: a fixed number
    cold_start_s: float = 30.0
    hops: Hops = field(default_factory=Hops)
    clients: Clients = field(default_factory=Clients)
    failures: tuple[Failure, ...] = ()
    updates: tuple[WeightUpdate, ...] = ()
    max_failovers: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 0 or (not self.replicas and self.scaling is None):
            raise ConfigError(f"replicas must be at least 1, got {self.replicas}", "replicas")
        if self.max_queue_size < 0:
            raise ConfigError(f"max_queue_size must be 0 (no bound) or more, got {self.max_queue_size}", "max_queue_size")
