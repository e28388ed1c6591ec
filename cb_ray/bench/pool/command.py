"""The pool's promises, tried on this machine: real Ray, real Serve, real HTTP, a random model in every replica.

    cb-ray bench pool kill drain         cb-ray bench pool all --json results.json

Owns the command line, the order of scenarios, and how results are shown: a table and a verdict for each promise. The exit status
is 1 when one of them did not hold. Everything is shut down at the end, and on Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..plot import check_figure
from .judge import Outcome, table

FAILURES = {
    "kill": "SIGKILL of a replica under full load",
    "drain": "a replica leaves and another comes",
    "redeploy": "a new version is rolled out under full load",
    "stuck": "a step never ends",
    "board": "SIGKILL of the Board",
    "router": "SIGKILL of one of two Routers",
}
SCENARIOS = {
    **FAILURES,
    "overload": "three times what the pool can do, with one and with two Routers",
    "prefix": "more shared prefixes than one cache holds, under each policy",
    "validate": "what `cb-ray plan` would have said, beside what is measured",
    "scale": "from one replica to all and back, from none to one",
    "weights": "other weights, replica by replica, under full load",
    "plane": "pieces of streams per second, with and without Serve's fast path",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    listing = "\n".join(f"  {name:<12}{text}" for name, text in SCENARIOS.items())
    parser = argparse.ArgumentParser(
        prog="cb-ray bench pool",
        description=(__doc__ or "").split("\n\n")[0],
        epilog=f"scenarios:\n{listing}\n  all         one after the other",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenarios", nargs="+", choices=[*SCENARIOS, "all"], metavar="SCENARIO")
    parser.add_argument("--replicas", type=int, default=4, help="Engine replicas (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=64, help="of the failure scenarios (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="of the model: what a token costs (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--seconds",
        type=float,
        default=120,
        help="of overload, for each number of Routers; of each load of validate, half as many (default: %(default)s)",
    )
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2], help="of overload (default: 1 2)")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw scaling there (.svg, .png)")
    parser.add_argument("--plain", action="store_true", help="Serve as it is by default, without its fast path")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)  # one path of `plane`, for the process that asked
    given = parser.parse_args(argv)
    if given.figure is not None:
        check_figure(given.figure)
    names = list(SCENARIOS) if "all" in given.scenarios else [name for name in SCENARIOS if name in given.scenarios]
    if not given.plain:
        fast_path()
    outcomes: list[Outcome] = []
    try:
        if given.rows:
            print(json.dumps(asyncio.run(_one_path(given))))
            return 0
        asyncio.run(_run(given, names, outcomes))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return _report(outcomes, given.json, complete=len(outcomes) == len(names))


def fast_path() -> None:
    """Serve as `cb-ray serve` starts it. Ray reads the environment when it is imported."""
    from ...serving import haproxy
    from ...serving.command import DATA_PLANE

    for variable, value in DATA_PLANE.items():
        os.environ.setdefault(variable, value)
    if path := haproxy.command_path():
        os.environ.setdefault(haproxy.VARIABLE, path)


async def _run(given: argparse.Namespace, names: Sequence[str], outcomes: list[Outcome]) -> None:
    from . import failures, overload, plane, prefix, scale, validate, weights
    from .sitting import Sitting

    with tqdm(total=len(names), desc="pool", unit="scenario", disable=None) as bar:

        def tell(what: str) -> None:
            bar.set_postfix_str(what)
            if bar.disable:
                print(f"pool: {what}", file=sys.stderr, flush=True)

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            tqdm.write(_shown(outcome))
            sys.stdout.flush()
            bar.update()

        async def attempt(what: Awaitable[None]) -> None:
            """What one scenario breaks on does not keep the others from being tried."""
            try:
                await what
            except Exception:
                tqdm.write(traceback.format_exc(), file=sys.stderr)

        if "plane" in names:
            await attempt(plane.run(["--replicas", str(given.replicas)], tell, done))
        if set(names) == {"plane"}:
            return
        tell("Ray starts")
        async with Sitting.open(_model(given), given.replicas) as sitting:
            await attempt(failures.run(sitting, names, given.streams, tell, done))
            if "router" in names:
                await attempt(failures.run_router(sitting, given.streams, tell, done))
            if "overload" in names:
                await attempt(overload.run(sitting, given.routers, given.seconds, tell, done))
            if "prefix" in names:
                await attempt(prefix.run(sitting, tell, done))
            if "validate" in names:
                await attempt(validate.run(sitting, given.seconds / 2, tell, done))
            if "weights" in names:
                await attempt(weights.run(sitting, given.streams, given.width, given.layers, tell, done))
            if "scale" in names:
                await attempt(scale.run(sitting, given.figure, tell, done))


async def _one_path(given: argparse.Namespace) -> list[dict[str, Any]]:
    from . import plane
    from .sitting import Sitting

    def tell(what: str) -> None:
        print(f"plane: {what}", file=sys.stderr, flush=True)

    async with Sitting.open(_model(given), given.replicas) as sitting:
        return await plane.measure(sitting, tell)


def _model(given: argparse.Namespace) -> Path:
    from .model import words_model

    return words_model(given.width, given.layers)


def _shown(outcome: Outcome) -> str:
    verdicts = [f"{'HOLDS' if verdict.holds else 'FAILS'}  {verdict.promise}: {verdict.found}" for verdict in outcome.verdicts]
    return "\n".join([f"\n{outcome.scenario}\n", table(outcome.rows), "", *verdicts])


def _report(outcomes: Sequence[Outcome], file: Path | None, complete: bool) -> int:
    """Writes the file; 0 if everything was tried and held."""
    if file is not None:
        file.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return 0 if complete and all(verdict.holds for outcome in outcomes for verdict in outcome.verdicts) else 1
