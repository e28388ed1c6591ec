"""What every replica of a simulated pool is like: its cache, its steps and what they cost. Owns `EngineShape`.

Makes production cores: `EngineFacts`, `CacheLayout` and `RequestLimits` are the engine's own, over an imaginary layer whose keys and
values take no bytes worth counting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import EngineFacts
from ..core.layout import CacheLayout, LayerSpec
from ..core.request import RequestLimits
from ..errors import ConfigError
from .costs import StepCosts
from .leaping_core import LeapingCore


class ShownLimits(RequestLimits):
    """Token ids were made here, so there is nothing to check but lengths."""

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Sizes are tokens. `slots`: requests that the pool grants one replica at once."""

    costs: StepCosts
    page_size: int = 64
    cache_tokens: int = 262_144
    max_batch_tokens: int = 2048
    max_requests: int = 256
    slots: int = 256
    max_length: int = 262_144
    scheduler: str = "fifo"
    safety_margin: float = 0.15
    leaps: bool = True  # False: every step is planned; the same outcome, later

    def __post_init__(self) -> None:
        for name in ("page_size", "cache_tokens", "max_batch_tokens", "max_requests", "slots", "max_length"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", name)
        if self.cache_tokens < 2 * self.page_size:
            raise ConfigError(f"cache_tokens must hold two pages of {self.page_size}, got {self.cache_tokens}", "cache_tokens")

    def make_core(self, seed: int) -> LeapingCore:
        """An engine's mind with an empty cache."""
        blocks = self.cache_tokens // self.page_size
        layout = CacheLayout.sized([LayerSpec(0, "full", 1, 1, 1)], page_size=self.page_size, itemsize=2, num_blocks=blocks)
        facts = EngineFacts.of(
            page_size=self.page_size,
            num_blocks=blocks,
            max_batch_tokens=self.max_batch_tokens,
            max_requests_per_batch=min(self.max_requests, self.max_batch_tokens),
            scheduler_type=self.scheduler,
            safety_margin=self.safety_margin,
            seed=seed,
        )
        limits = ShownLimits(
            vocab_size=1 << 31,
            max_length=self.max_length,
            max_cached_tokens=layout.max_tokens_alone(layout.max_chunk(self.max_batch_tokens, self.max_length)),
            page_size=self.page_size,
        )
        core = LeapingCore(facts=facts, layout=layout, limits=limits)
        core.track_names()
        return core
