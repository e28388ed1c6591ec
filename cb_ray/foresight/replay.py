"""Send what a door has recorded again: at its own pace or faster, to a server or to the simulator, and compare.

    cb-ray replay LOGS --url http://127.0.0.1:8000 --speed 2 --diff
    cb-ray replay LOGS --costs costs.json --replicas 3           the simulator
    cb-ray replay LOGS --export mooncake trace.jsonl

Owns the schedule and the comparison. The log must have token ids (`request_log.content: tokens`) for `--diff`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from tqdm import tqdm

from ..errors import ConfigError
from ..request_log import LoggedRequest, log_files, read_log
from ..simulation.ledger import percentile
from ..simulation.planner import attempt
from ..simulation.traces import request_log
from .arguments import add_pool, pool_of, slo_of, watched
from .export import FORMS, export
from .replay_client import Replayed, send, until
from .report import print_header, print_trial

_SHOWN = 10  # differences that are printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, help="a request log, or the directory that request_log.directory names")
    parser.add_argument("--speed", type=float, default=1.0, help="2: everything comes twice as fast")
    parser.add_argument("--limit", type=int, help="only the first so many requests")
    parser.add_argument("--seed", type=int, default=0, help="of the simulation")
    server = parser.add_argument_group("a server (otherwise the simulator, which needs --costs)")
    server.add_argument("--url", help="of a cb-ray door, without /v1")
    server.add_argument("--api-key")
    server.add_argument(
        "--vocab-size", type=int, default=32_000, help="of the tokens that stand for pages of which only digests are known"
    )
    server.add_argument("--diff", action="store_true", help="compare answers token for token; exit status 1 when one differs")
    parser.add_argument("--export", nargs=2, metavar=("FORM", "FILE"), help=f"write the log as {' or '.join(FORMS)} instead")
    parser.add_argument("--tokenizer", metavar="MODEL", help="for texts in a guidellm export of a log with token ids")
    add_pool(parser, required=False)


def run(given: argparse.Namespace) -> int:
    """0; 1 when `--diff` found a difference."""
    logged = sorted((one for file in log_files(given.log) for one in read_log(file)), key=lambda one: one.at_s)[: given.limit]
    if not logged:
        raise ConfigError(f"nothing is recorded in {given.log}", "log")
    if given.export:
        export(logged, given.export[0], Path(given.export[1]), _decoder(given.tokenizer))
        return 0
    if given.url is None:
        return _simulate(given)
    if given.diff and not any(one.answer_ids for one in logged):
        raise ConfigError("this log has no token ids to compare with; record with request_log.content: tokens", "diff")
    replayed = asyncio.run(replay(logged, given))
    found = judge(replayed)
    print(_text(found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return _differences(replayed) if given.diff else 0


async def replay(logged: Sequence[LoggedRequest], given: argparse.Namespace) -> list[Replayed]:
    """Send every request at its time, however slow the answers are."""
    loop, begin = asyncio.get_running_loop(), logged[0].at_s
    headers = {"Authorization": f"Bearer {given.api_key}"} if given.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        start, bar = loop.time(), tqdm(total=len(logged), desc="replaying", unit="req", disable=None)
        made = [Replayed(logged=one, due_s=(one.at_s - begin) / given.speed) for one in logged]

        async def one(replayed: Replayed) -> None:
            await until(start + replayed.due_s)
            url = given.url.rstrip("/") + "/generate"
            await send(session, url, replayed, vocab_size=given.vocab_size, headers=headers, max_returns=given.max_returns)
            bar.update()

        with bar:
            await asyncio.gather(*(one(replayed) for replayed in made))
    return made


def judge(replayed: Sequence[Replayed]) -> dict[str, float | int | None]:
    """What was measured, and what the log says of the same requests. Seconds; None where there is nothing to say."""
    whole = [one for one in replayed if not one.error]
    end = max((one.due_s + (one.e2e_s or 0.0) for one in replayed), default=0.0)
    now, then = (
        sorted(one.ttft_s for one in whole if one.ttft_s),
        sorted(one.logged.ttft_s for one in replayed if one.logged.ttft_s),
    )
    found: dict[str, float | int | None] = {
        "requests": len(replayed),
        "whole": len(whole),
        "refusals": sum(one.refusals for one in replayed),
        "failed": sum(bool(one.error) and not one.error.startswith("429") for one in replayed),
        "output_tokens_per_s": sum(len(one.answer) for one in replayed) / end if end else 0.0,
        "hit_rate": sum(one.num_cached for one in whole) / max(1, sum(one.logged.num_prompt for one in whole)),
        "logged_hit_rate": sum(one.logged.num_cached for one in replayed)
        / max(1, sum(one.logged.num_prompt for one in replayed)),
    }
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        for label, values in (("ttft", now), ("logged_ttft", then)):
            value = percentile(values, share)
            found[f"{label}_{name}_s"] = None if math.isnan(value) else value
    return found


def _text(found: dict[str, float | int | None]) -> str:
    return "\n".join(f"{name:<24}{'-' if value is None else f'{value:.4g}':>12}" for name, value in found.items())


def _differences(replayed: Sequence[Replayed]) -> int:
    comparable = [one for one in replayed if one.is_repeatable and not one.error]
    differing = [(one, at) for one in comparable if (at := one.first_difference()) is not None]
    for one, at in differing[:_SHOWN]:
        then, now = one.logged.answer_ids[at : at + 1], one.answer[at : at + 1]
        print(f"{one.logged.request_id}: token {at} was {then[0] if then else 'none'} and is {now[0] if now else 'none'}")
    skipped = len(replayed) - len(comparable)
    print(
        f"{len(comparable) - len(differing)} of {len(comparable)} answers are the same; {skipped} cannot be compared "
        "(drawn without a seed, cut short, or not answered)"
    )
    return 1 if differing else 0


def _simulate(given: argparse.Namespace) -> int:
    if given.costs is None:
        raise ConfigError("name a server with --url, or say what a step costs with --costs to replay in the simulator", "url")
    workload = request_log(given.log, page_size=given.page_size, speed=given.speed, limit=given.limit)
    plan, slo = pool_of(given, given.page_size), slo_of(given)
    print_header(workload, slo)
    attempt(f"{plan.replicas} replicas", plan, watched(workload, "simulating"), slo, given.warm_up, print_trial)
    return 0


def _decoder(model: str | None):
    if model is None:
        return None
    from transformers import AutoTokenizer

    from ..engine.model_source import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(model).path)
    return lambda ids: tokenizer.decode(ids)
