"""How long a step takes: a linear form over what its plan says. Owns `StepCosts` and `StepClock`.

    seconds = step + query · tokens computed + sample · tokens sampled + kv · cached tokens read + attend · prefill pairs

What is counted is `core.plan.StepWork`'s. On the agenda, coefficients are whole femtoseconds, so that sums over many steps are
exact. May know the plan, nothing of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..core.plan import StepWork
from ..errors import ConfigError, nearest
from .agenda import ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds: of a step as such, per token computed, per token sampled, per cached token read, per prefill pair."""

    step_s: float
    query_s: float
    sample_s: float = 0.0
    kv_s: float = 0.0
    attend_s: float = 0.0

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> StepCosts:
        """Raises ConfigError for an unknown or missing name, or a negative number."""
        known = set(cls.__dataclass_fields__)
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"step costs have no field {name!r}; {nearest(name, known)}", name)
            if not isinstance(value, (int, float)) or value < 0:
                raise ConfigError(f"step cost {name} must be a number of seconds, 0 or more, got {value!r}", name)
        if not {"step_s", "query_s"} <= values.keys():
            raise ConfigError(f"step costs need at least step_s and query_s, got {sorted(values)}", "costs")
        return cls(**{name: float(str(value)) for name, value in values.items()})

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    def seconds(self, work: StepWork) -> float:
        return (
            self.step_s
            + self.query_s * work.query_tokens
            + self.sample_s * work.samples
            + self.kv_s * work.kv_tokens
            + self.attend_s * work.prefill_pairs
        )


class StepClock:
    """`StepCosts` in ticks."""

    def __init__(self, costs: StepCosts) -> None:
        self._step, self._query, self._sample = ticks(costs.step_s), ticks(costs.query_s), ticks(costs.sample_s)
        self._kv, self._attend = ticks(costs.kv_s), ticks(costs.attend_s)

    def of(self, work: StepWork) -> int:
        query, samples, kv, pairs = work
        return max(1, self._step + self._query * query + self._sample * samples + self._kv * kv + self._attend * pairs)

    def decode(self, rows: int, kv_tokens: int) -> tuple[int, int]:
        """A step of `rows` single tokens over `kv_tokens` cached ones: how long it takes, and how much longer each next one."""
        return self.of(StepWork(rows, rows, kv_tokens, 0)), self._kv * rows
