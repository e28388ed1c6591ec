"""`cb-ray plan fit`: what a step costs, from the step logs of running engines, or from an engine made here to be measured.

cb-ray plan fit LOG... --out costs.json          logs that replicas wrote under the setting engine.step_log
cb-ray plan fit --model demo:smollm2-135m --out costs.json
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..core.plan import StepWork
from ..errors import ConfigError
from ..messages import GenerateRequest, SamplingParams
from ..simulation.fitting import Fit, MeasuredStep, fit_costs, read_steps


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cb-ray plan fit", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("logs", nargs="*", type=Path, help="step logs, or directories of them")
    parser.add_argument("--model", help="instead of logs: make an engine of this model here and measure it")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, help="of torch; default: as it finds them")
    parser.add_argument("--steps", type=int, default=600, help="to be measured with --model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the costs, as `plan size` and `compare` take them")
    given = parser.parse_args(argv)
    if bool(given.logs) == bool(given.model):
        raise ConfigError("either name step logs, or --model to measure one here", "logs")
    steps = _measure(given) if given.model else read_steps(_files(given.logs))
    fit = fit_costs(steps)
    print(_text(fit))
    if given.out:
        found = {"costs": fit.costs.as_dict(), "fit": {name: value for name, value in asdict(fit).items() if name != "costs"}}
        given.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def _files(paths: Sequence[Path]) -> list[Path]:
    found = [file for path in paths for file in (sorted(path.glob("steps-*.jsonl")) if path.is_dir() else [path])]
    if not found:
        raise ConfigError(f"there is no step log in {', '.join(map(str, paths))}", "logs")
    return found


def _text(fit: Fit) -> str:
    names = {
        "step_s": "a step as such",
        "query_s": "a token computed",
        "sample_s": "a token sampled",
        "kv_s": "a cached token read",
        "attend_s": "a pair of query and key in a prompt",
    }
    lines = [f"{text:<38}{_time(getattr(fit.costs, name)):>12}" for name, text in names.items()]
    return "\n".join(
        [
            *lines,
            f"fitted to {fit.steps} steps; on {fit.held_out} others the relative error is {fit.error_p50:.1%} (median), "
            f"{fit.error_p90:.1%} (p90); their time together is off by {fit.bias:+.1%}",
        ]
    )


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-12:.3g} ps" if seconds else "0"


def _measure(given: argparse.Namespace) -> list[MeasuredStep]:
    """Steps of many kinds: requests of all lengths come and go while others decode."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..config import ContinuousBatchingConfig
    from ..engine.build import build
    from ..engine.model_source import resolve_model

    if given.threads:
        torch.set_num_threads(given.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model(given.model).path, dtype=getattr(torch, given.dtype)).eval()
    parts = build(model, model.generation_config, ContinuousBatchingConfig(max_requests_per_batch=64, allow_block_sharing=False))
    core, runner, dice = parts.core, parts.runner, random.Random(given.seed)
    longest = min(2048, parts.limits.max_length // 2, parts.limits.max_cached_tokens // 2)
    steps: list[MeasuredStep] = []
    number, wanted = 0, 1
    runner.install()
    try:
        for step in tqdm(range(given.steps), desc="measuring steps", unit="step", disable=None):
            if step % 25 == 0:
                wanted = dice.choice((1, 2, 4, 8, 16, 32, 64))
            while core.stats().num_running + core.num_waiting < wanted:
                length = int(dice.triangular(1, longest, 64))
                ids = tuple(dice.randrange(parts.limits.vocab_size) for _ in range(length))
                sampling = SamplingParams(do_sample=False)
                core.add(
                    GenerateRequest(
                        request_id=str(number), token_ids=ids, max_new_tokens=dice.randrange(8, 120), sampling=sampling
                    ),
                    0.0,
                )
                number += 1
            begin = time.perf_counter()
            plan = core.plan(begin)
            result = runner.collect(runner.submit(plan))
            core.commit(plan, result, time.perf_counter())
            core.take_chunks()
            if step >= 10:
                steps.append(MeasuredStep(StepWork.of(plan.rows), time.perf_counter() - begin))
    except KeyboardInterrupt:
        print("interrupted; fitting what there is")
    finally:
        runner.close()
    return steps
