"""How many replicas, which routing, what would happen: the production scheduler and router, run over a trace in simulated time.

Owns the list of things that `cb-ray plan` does; each is a module with `main(argv) -> int`, imported when it is asked for.
"""

from __future__ import annotations

import argparse
import importlib

ACTIONS = {
    "size": ("plan_size", "the smallest pool that keeps a promise, its scaling and its waiting line"),
    "compare": ("plan_compare", "every routing policy and an oracle over one workload"),
    "overload": ("plan_overload", "three times what a pool can do, and clients that obey Retry-After"),
    "fit": ("plan_fit", "what a step costs, from steps that were measured"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listing = "\n".join(f"  {name:<10}{text}" for name, (_, text) in ACTIONS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"actions:\n{listing}\n\ncb-ray plan ACTION --help tells more."
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(given: argparse.Namespace) -> int:
    return importlib.import_module(f"cb_ray.foresight.{ACTIONS[given.action][0]}").main(given.rest)
