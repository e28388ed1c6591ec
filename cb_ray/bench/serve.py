"""Load on any OpenAI-compatible server, and what its clients see: throughput, latencies, goodput, refusals.

    cb-ray bench serve --rate 1 2 4 8 --duration 60 --slo ttft=1.0,itl=0.05     Poisson arrivals, a sweep of rates
    cb-ray bench serve --concurrency 32 --workload sharegpt --requests 256      a fixed number under way
    cb-ray bench serve --base-url http://other:8000/v1 --rate 4 --json b.json --plot both.svg --beside a.json

Owns the command: its workload, the points of its sweep, the table, the files. Needs neither torch nor Ray, and an engine only on
the other side of the wire.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import CbRayError, ConfigError
from .arrivals import FORMS, Arrivals
from .plot import FORMATS, Line, Panel, check_figure, draw
from .report import details, parse_slo, summarize
from .workloads import Item, Lengths, Shape, encoder, random_ids, random_words, read_workload, sharegpt

_WARM_UP_SEED = 1_000_003  # far from those of a sweep's points
_DEFAULT_URL = "http://127.0.0.1:8000/v1"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="cb-ray bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_target(made)
    add_workload(made)
    load = made.add_argument_group("load: --rate or --concurrency, several for a sweep; neither: all at once")
    load.add_argument("--rate", type=float, nargs="+", metavar="PER_S", help="requests a second, whatever the server does")
    load.add_argument("--concurrency", type=int, nargs="+", metavar="N", help="requests under way, the next when one ends")
    load.add_argument("--arrivals", default="poisson", help=f"{FORMS} (default: %(default)s); a trace's --rate is its speed")
    load.add_argument("--duration", type=float, metavar="S", help="how long a --rate is kept; instead of --requests")
    load.add_argument("--warm-up", type=int, default=2, metavar="N", help="requests before, not counted (default: %(default)s)")
    out = made.add_argument_group("results")
    out.add_argument("--slo", default="", metavar="NAME=S,…", help="limits for goodput: ttft, tpot, itl (p99 of a request), e2e")
    out.add_argument("--label", help="name of the server in figures (default: the model's)")
    out.add_argument("--json", type=Path, metavar="FILE", help="all figures, one object")
    out.add_argument("--records", action="store_true", help="every request's times in --json as well")
    out.add_argument("--plot", type=Path, metavar="FILE", help=f"a figure: {', '.join(FORMATS)}")
    out.add_argument(
        "--beside", type=Path, nargs="+", default=[], metavar="FILE", help="--json of others, drawn in the same figure"
    )
    return made


def add_target(made: argparse.ArgumentParser) -> None:
    """What to send requests to."""
    target = made.add_argument_group("server")
    target.add_argument("--base-url", default=_DEFAULT_URL, help="with /v1 (default: %(default)s)")
    target.add_argument("--model", help="default: the first that the server lists")
    target.add_argument("--endpoint", choices=("chat", "completions"), help="default: chat, or completions for token ids")
    target.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")
    target.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of a request (default: %(default)s)")
    target.add_argument(
        "--retries", type=int, default=0, help="how often a 429 or 503 is tried again after its Retry-After (default: never)"
    )
    target.add_argument("--body", default="{}", metavar="JSON", help="more fields of every request")
    target.add_argument(
        "--eos", action="store_true", help="let answers end by themselves; without it ignore_eos keeps lengths equal everywhere"
    )


def add_workload(made: argparse.ArgumentParser) -> None:
    """What to ask."""
    work = made.add_argument_group("workload")
    work.add_argument(
        "--work", type=Path, metavar="FILE", help="prompt_ids, prompt or messages, with max_tokens; JSON or JSON lines"
    )
    work.add_argument("--workload", choices=("words", "ids", "sharegpt"), default="words", help="(default: %(default)s)")
    work.add_argument("--requests", type=int, metavar="N", help="default: 64, or as many as the file has")
    work.add_argument("--prompt", type=Lengths.parse, default=Lengths(8, 512), metavar="LOW:HIGH", help="tokens (default: 8:512)")
    work.add_argument(
        "--output", type=Lengths.parse, default=Lengths(16, 128), metavar="LOW:HIGH", help="tokens (default: 16:128)"
    )
    work.add_argument("--shared-prefix", type=int, default=0, metavar="TOKENS", help="in front of every prompt of a group")
    work.add_argument("--prefix-groups", type=int, default=1, metavar="N", help="how many different ones (default: %(default)s)")
    work.add_argument(
        "--tokenizer", default="demo:smollm2-135m", metavar="MODEL", help="measures ShareGPT (default: %(default)s)"
    )
    work.add_argument("--vocab-size", type=int, default=32_000, help="for --workload ids (default: %(default)s)")
    work.add_argument("--seed", type=int, default=0)


def workload(given: argparse.Namespace, requests: int | None, seed: int) -> list[Item]:
    """The requests that a command line asks for. Raises ConfigError."""
    if given.work is not None:
        items = read_workload(given.work)
        count = requests or len(items)
        return [items[number % len(items)] for number in range(count)]
    shape = Shape(
        requests=requests or 64,
        prompt=given.prompt,
        output=given.output,
        shared_prefix=given.shared_prefix,
        prefix_groups=given.prefix_groups,
        seed=seed,
    )
    if given.workload == "ids":
        return random_ids(shape, given.vocab_size)
    if given.workload == "sharegpt":
        return sharegpt(shape.requests, encoder(given.tokenizer), as_messages=given.endpoint != "completions", seed=seed)
    return random_words(shape)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 1 when no request was answered."""
    given = parser().parse_args(argv)
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("this needs aiohttp; pip install 'cb-ray[bench]' brings it")
    if given.plot is not None:
        check_figure(given.plot)
    if given.rate and given.concurrency:
        raise ConfigError("choose --rate (open loop) or --concurrency (closed loop), not both", field="rate")
    if any(not point > 0 for point in [*(given.rate or ()), *(given.concurrency or ())]):
        raise ConfigError("rates and concurrencies must be above 0", field="rate")
    try:
        extra = json.loads(given.body)
    except ValueError as error:
        raise ConfigError(f"--body must be a JSON object: {error}", field="body") from error
    slo, arrivals = parse_slo(given.slo), Arrivals.parse(given.arrivals)
    from .load import run_until_interrupted

    result = run_until_interrupted(lambda: measure(given, extra, slo, arrivals))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if given.plot is not None:
        others = [json.loads(file.read_text(encoding="utf-8")) for file in given.beside]
        draw(panels([*others, result]), given.plot, title="Load and what its clients see")
    return 0 if any(point["completed"] for point in result["points"]) else 1


async def measure(
    given: argparse.Namespace, extra: Mapping[str, Any], slo: Mapping[str, float], arrivals: Arrivals
) -> dict[str, Any]:
    """All points of a sweep, printed as they are measured."""
    from .client import Target
    from .load import closed_loop, new_session, open_loop

    seed = given.seed
    items = workload(given, points_requests(given, 0), seed)
    endpoint = given.endpoint or ("completions" if items[0].prompt_ids is not None else "chat")
    headers = {"Authorization": f"Bearer {given.api_key}"} if given.api_key else {}
    body = {"temperature": 0, **({} if given.eos else {"ignore_eos": True}), **extra}
    async with new_session() as session:
        model = given.model or await first_model(session, given.base_url, headers)
        target = Target(
            base_url=given.base_url,
            model=model,
            endpoint=endpoint,
            headers=headers,
            body=body,
            timeout_s=given.timeout,
            retries=given.retries,
        )
        if given.warm_up:
            # other prompts than those that count, where they can be made, so that none of them is in a cache
            warming = workload(given, given.warm_up, seed + _WARM_UP_SEED) if given.work is None else items[: given.warm_up]
            await closed_loop(session, replace(target, retries=0), warming, given.warm_up)
        print(f"{model} at {given.base_url}, {endpoint}; milliseconds unless said otherwise")
        print(HEADER, flush=True)
        points: list[dict[str, Any]] = []
        for number, value in enumerate(given.rate or given.concurrency or [math.inf]):
            if number:  # fresh prompts: the last point's are in the server's cache by now
                items = workload(given, points_requests(given, number), seed + number)
            with tqdm(total=len(items), unit="request", leave=False, disable=None) as bar:
                if given.concurrency:
                    run = await closed_loop(session, target, items, int(value), lambda record: bar.update())
                else:
                    times = arrivals.times(items, value, seed + number)
                    run = await open_loop(session, target, items, times, lambda record: bar.update())
            point = {"load": load_of(given, value, arrivals), "seed": seed + number, **summarize(run, slo)}
            if given.records:
                point["records"] = details(run.records)
            points.append(point)
            print(row(point), flush=True)
            for warning in point["warnings"]:
                print(f"  ! {warning}", flush=True)
            if run.unsent:
                break
    return {"label": given.label or model, "model": model, "base_url": given.base_url, "endpoint": endpoint, "points": points}


def points_requests(given: argparse.Namespace, number: int) -> int | None:
    """How many requests a point of the sweep has."""
    if given.duration is not None and given.rate:
        return max(1, round(given.duration * given.rate[number]))
    return given.requests


def load_of(given: argparse.Namespace, value: float, arrivals: Arrivals) -> dict[str, Any]:
    """The load of one point, as it stands in the results."""
    if given.concurrency:
        return {"concurrency": value}
    return {"rate": value if math.isfinite(value) else "inf", "arrivals": str(arrivals)}


async def first_model(session: Any, base_url: str, headers: Mapping[str, str]) -> str:
    """The first model that a server lists. Raises CbRayError where it cannot be asked."""
    import aiohttp

    url = base_url.rstrip("/") + "/models"
    try:
        async with session.get(url, headers=headers) as response:
            response.raise_for_status()
            return (await response.json())["data"][0]["id"]
    except (aiohttp.ClientError, OSError, LookupError, ValueError) as error:
        raise CbRayError(f"{url} does not list its models ({type(error).__name__}: {error}); name one with --model") from error


_COLUMNS = (  # heading, width, where the figure is, factor
    ("tok/s", 9, ("output_tokens_per_s",), 1),
    ("req/s", 8, ("requests_per_s",), 1),
    ("TTFT p50", 10, ("ttft_s", "p50"), 1e3),
    ("p90", 8, ("ttft_s", "p90"), 1e3),
    ("p99", 8, ("ttft_s", "p99"), 1e3),
    ("TPOT p50", 10, ("tpot_s", "p50"), 1e3),
    ("ITL p50", 9, ("itl_s", "p50"), 1e3),
    ("p90", 8, ("itl_s", "p90"), 1e3),
    ("p99", 8, ("itl_s", "p99"), 1e3),
    ("e2e p50", 9, ("e2e_s", "p50"), 1e3),
    ("p99", 8, ("e2e_s", "p99"), 1e3),
    ("good %", 8, ("goodput", "share"), 100),
    ("lag p99", 9, ("client", "lag_s", "p99"), 1e3),
)
HEADER = f"{'load':<12}{'done':>6}{'errors':>7}" + "".join(f"{heading:>{width}}" for heading, width, _, _ in _COLUMNS)


def row(point: Mapping[str, Any]) -> str:
    """One line of the table."""
    load = point["load"]
    name = f"{load['concurrency']} at once" if "concurrency" in load else f"{load['rate']}/s"
    cells = [f"{name:<12}{point['completed']:>6}{point['requests'] - point['completed']:>7}"]
    for _, width, path, factor in _COLUMNS:
        value: Any = point
        for part in path:
            value = None if value is None else value[part]
        if value is None:
            cells.append(f"{'–':>{width}}")
        else:
            decimals = 2 if path[0] == "requests_per_s" else 1 if value * factor < 10_000 else 0
            cells.append(f"{value * factor:>{width}.{decimals}f}")
    return "".join(cells)


def panels(results: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Throughput, goodput and latencies over the load, a line for each server."""
    closed = all("concurrency" in point["load"] for result in results for point in result["points"])
    axis = "requests under way" if closed else "requests/s asked"

    def lines(*path: str, factor: float = 1.0) -> list[Line]:
        made: list[Line] = []
        for result in results:
            xs, ys = [], []
            for point in result["points"]:
                load = point["load"]
                xs.append(float(load.get("concurrency", load.get("rate"))))
                value: Any = point
                for part in path:
                    value = None if value is None else value[part]
                ys.append(None if value is None else value * factor)
            made.append(Line(result["label"], xs, ys))
        return made

    made = [
        Panel(title="Throughput", x=axis, y="output tokens/s", lines=lines("output_tokens_per_s")),
        Panel(title="Time to first token, p50", x=axis, y="ms", lines=lines("ttft_s", "p50", factor=1e3)),
        Panel(title="Time to first token, p99", x=axis, y="ms", log_y=True, lines=lines("ttft_s", "p99", factor=1e3)),
        Panel(title="Time per output token, p50", x=axis, y="ms", lines=lines("tpot_s", "p50", factor=1e3)),
        Panel(title="Gap between tokens, p99", x=axis, y="ms", lines=lines("itl_s", "p99", factor=1e3)),
    ]
    if any(point["goodput"] for result in results for point in result["points"]):
        made.append(Panel(title="Goodput", x=axis, y="requests/s within the SLO", lines=lines("goodput", "requests_per_s")))
    return made


if __name__ == "__main__":
    sys.exit(main())
