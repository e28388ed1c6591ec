"""What it costs to plan and commit a step: the core alone, with a runner that answers at once.

    cb-ray bench scheduler                      32, 256 and 1024 running requests, 0 and 10,000 waiting

Owns the measurement only. Every running request decodes one token a step; medians over steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

from ..config import EngineFacts
from ..core.engine_core import EngineCore
from ..core.layout import CacheLayout, LayerSpec
from ..core.plan import StepResult
from ..core.request import RequestLimits
from ..messages import GenerateRequest, SamplingParams

_GREEDY = SamplingParams(do_sample=False)
_CONTEXT = 512


def measure(running: int, waiting: int, *, stream: bool, steps: int, page_size: int = 64) -> tuple[float, float]:
    """(plan, commit) in milliseconds, medians over `steps` decode steps."""
    blocks = (running + 1) * (-(-(_CONTEXT + steps + 600) // page_size) + 1)
    layout = CacheLayout.sized([LayerSpec(0, "full", 1, 1, 1)], page_size=page_size, itemsize=2, num_blocks=blocks)
    tokens = max(8192, running)
    facts = EngineFacts.of(page_size=page_size, max_batch_tokens=tokens, max_requests_per_batch=running)
    limits = RequestLimits(vocab_size=1 << 15, max_length=1 << 20, max_cached_tokens=layout.max_tokens_alone(tokens))
    core = EngineCore(facts=facts, layout=layout, limits=limits)
    for index in range(running + waiting):
        prompt = tuple((index * 7919 + i * 31) % (1 << 15) for i in range(_CONTEXT if index < running else 16))
        request = GenerateRequest(
            request_id=f"r{index}", token_ids=prompt, max_new_tokens=steps + 512, sampling=_GREEDY, stream=stream
        )
        core.add(request, 0.0)
    planning: list[float] = []
    committing: list[float] = []
    while len(planning) < steps:
        begin = time.perf_counter()
        plan = core.plan(0.0)
        planned = time.perf_counter()
        result = StepResult([7] * sum(row.samples for row in plan.rows))
        ready = time.perf_counter()
        core.commit(plan, result, 0.0)
        core.take_chunks()
        done = time.perf_counter()
        if plan.is_decode and len(plan.rows) == running:
            planning.append(planned - begin)
            committing.append(done - ready)
    return statistics.median(planning) * 1e3, statistics.median(committing) * 1e3


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cb-ray bench scheduler", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--running", type=int, nargs="+", default=(32, 256, 1024), metavar="N")
    parser.add_argument("--waiting", type=int, nargs="+", default=(0, 10_000), metavar="N")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stream", action="store_true", help="requests that are told of every token")
    parser.add_argument("--json", action="store_true", help="one object per row, one a line")
    given = parser.parse_args(argv)
    if not given.json:
        print(f"{'running':>8} {'waiting':>8} {'plan ms':>9} {'commit ms':>10} {'together':>9}")
    for running in given.running:
        for waiting in given.waiting:
            plan, commit = measure(running, waiting, stream=given.stream, steps=given.steps)
            if given.json:
                print(json.dumps({"running": running, "waiting": waiting, "plan_ms": plan, "commit_ms": commit}))
            else:
                print(f"{running:>8} {waiting:>8} {plan:>9.3f} {commit:>10.3f} {plan + commit:>9.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
