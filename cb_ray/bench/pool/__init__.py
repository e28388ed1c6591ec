"""`cb-ray bench pool`: what the pool promises, tried on real processes. `command.py` has the list of scenarios."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status. Imported late: the client is a process that needs nothing but `client.py`."""
    from .command import main

    return main(argv)
