"""How good Retry-After is: what refused callers were told, and when a place was really there for each. Owns `Promises`.

The pool promises each refused caller the next place that nobody was promised yet. So the n-th caller that waits for its promise owns
the n-th place that becomes free from now on; the moment at which it does is the truth that the promise is held against.
"""

from __future__ import annotations

from collections import OrderedDict

from .agenda import seconds
from .ledger import Ledger, Promise


class Promises:
    """Callers that were refused and own no place yet, first refused first."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._open: OrderedDict[int, tuple[float, float]] = OrderedDict()  # caller → refused at, told

    def refused(self, now: int, caller: int, told_s: float) -> None:
        self._open.setdefault(caller, (seconds(now), told_s))

    def place_free(self, now: int) -> None:
        """A request has ended somewhere."""
        if self._open:
            _, (at_s, told_s) = self._open.popitem(last=False)
            self._ledger.promises.append(Promise(at_s, told_s, seconds(now) - at_s))
