"""What grammars cost: the same requests with a JSON schema and without, and what requests without one see beside them.

    cb-ray bench grammar --model demo:smollm2-135m --requests 16 --beside 4

Owns the measurement only. Both kinds run in turn in one process, several times, and the result is the ratio of neighbours, so that
a machine that slows down slows both. Every request makes the same number of tokens: the schema's list is longer than that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from ..grammar import Grammar
from .report import spread
from .workloads import Lengths, Shape, random_ids

# Free text, numbers, choices and nesting, as answers of an extraction have them.
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["person", "place", "thing"]},
            "score": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
            "where": {
                "type": "object",
                "properties": {"line": {"type": "integer", "minimum": 0}, "exact": {"type": "boolean"}},
                "required": ["line", "exact"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "kind", "score", "tags", "where"],
        "additionalProperties": False,
    },
}


async def run_pass(
    manager: Any, prompts: Sequence[list[int]], beside: int, tokens: int, grammar: Grammar | None
) -> dict[str, Any]:
    """All requests at once; the last `beside` of them never have a grammar. Seconds until the others ended, gaps of those."""
    gaps: list[float] = []
    made = 0

    async def stream(prompt: list[int], wish: Grammar | None, seed: int, watched: bool) -> float:
        nonlocal made
        last = 0.0
        sampling: dict[str, Any] = {"temperature": 1.0, "seed": seed, **({} if wish is None else {"grammar": wish})}
        async for output in manager.stream(prompt, max_new_tokens=tokens, eos_token_id=-1, **sampling):
            now = time.perf_counter()
            if watched and last:
                gaps.append(now - last)
            last = now
            if output.is_finished():
                if output.error is not None:
                    raise RuntimeError(output.error)
                made += len(output.generated_tokens) * (not watched)
        return last

    begin = time.perf_counter()
    bound = len(prompts) - beside
    jobs = [stream(prompt, grammar if n < bound else None, n, n >= bound) for n, prompt in enumerate(prompts)]
    ends = await asyncio.gather(*jobs)
    seconds = max(ends[:bound]) - begin
    return {"tokens": made, "seconds": seconds, "tokens_per_s": made / seconds, "gaps": gaps}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cb-ray bench grammar", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="demo:smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=16, help="that run with the schema, or without")
    parser.add_argument("--beside", type=int, default=4, help="that run beside them and never have a grammar")
    parser.add_argument("--tokens", type=int, default=128, help="of each request")
    parser.add_argument("--passes", type=int, default=3, help="of each kind, in turn, after one that only warms up")
    parser.add_argument("--schema", help="JSON Schema of one item of a long list, instead of the built-in one")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)

    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from ..config import ContinuousBatchingConfig
    from ..engine.generate import continuous_batching_context_manager
    from ..engine.model_source import resolve_model

    directory = resolve_model(given.model).path
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, given.dtype))
    schema = SCHEMA if given.schema is None else {**SCHEMA, "items": json.loads(given.schema)}
    grammar = Grammar.json_schema(schema)
    shape = Shape(requests=given.requests + given.beside, prompt=Lengths(32, 32), seed=given.seed)
    items = random_ids(shape, model.config.get_text_config().vocab_size)
    prompts = [list(item.prompt_ids or ()) for item in items]
    passes: dict[str, list[dict[str, Any]]] = {"free": [], "bound": []}
    with continuous_batching_context_manager(
        model,
        generation_config=GenerationConfig(do_sample=True, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(per_request_processors=True),
    ) as manager:
        for number in tqdm(range(given.passes + 1), desc="passes", disable=None):
            for name, wish in (("free", None), ("bound", grammar)):
                done = asyncio.run(run_pass(manager, prompts, given.beside, given.tokens, wish))
                if number:
                    passes[name].append(done)
    print(json.dumps(_report(passes)))
    return 0


def _report(passes: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    pairs = list(zip(passes["free"], passes["bound"], strict=True))
    speed = {name: round(statistics.median(one["tokens_per_s"] for one in many), 1) for name, many in passes.items()}
    gaps = {name: [gap for one in many for gap in one["gaps"]] for name, many in passes.items()}
    report: dict[str, Any] = {
        "tokens_per_s": speed,
        "tokens_per_s_ratio": round(statistics.median(bound["tokens_per_s"] / free["tokens_per_s"] for free, bound in pairs), 4),
    }
    if all(gaps.values()):
        report["beside_itl_s"] = {name: spread(some) for name, some in gaps.items()}
        ratios = [statistics.median(bound["gaps"]) / statistics.median(free["gaps"]) for free, bound in pairs]
        report["beside_itl_ratio"] = round(statistics.median(ratios), 4)
    return report


if __name__ == "__main__":
    sys.exit(main())
