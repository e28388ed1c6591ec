"""What every rank of a divided model runs in `test_tensor_parallel.py`: `torchrun --nproc-per-node N ranks_story.py STORY OUT MODEL …`.

It is an ordinary program over the manager's API, the same on every rank, and writes what it saw to OUT/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DistributedConfig

from cb_ray import ContinuousBatchingConfig, ContinuousBatchingManager
from cb_ray.engine.generate import generate_batch
from cb_ray.runtime.kv_cache import KVCache

GREEDY = {"do_sample": False, "eos_token_id": -1}


def load(path: str) -> Any:
    size = int(os.environ["WORLD_SIZE"])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=size))
    model.generation_config.update(max_new_tokens=8, **GREEDY)
    return model


def prompts(count: int = 4, base: int = 5) -> list[list[int]]:
    return [[(37 * i + 11 * j) % 300 + 3 for j in range(base + 7 * i)] for i in range(count)]


def roomy(**settings: Any) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(page_size=4, num_blocks=200, **settings)


def batches(*paths: str) -> dict[str, Any]:
    """Prompts in chunks over few blocks, so that requests are preempted and parked; then forks and seeded sampling."""
    seen: dict[str, Any] = {}
    moves: list[int] = []
    copy = KVCache._copy

    def count(cache: KVCache, copies: Any, *ends: Any) -> None:
        moves.append(len(copies))
        copy(cache, copies, *ends)

    KVCache._copy = count
    for path in paths:
        model = load(path)
        tight = ContinuousBatchingConfig(page_size=4, num_blocks=14, max_batch_tokens=16, cpu_offload_space=0.01)
        outputs = generate_batch(model, prompts(), continuous_batching_config=tight, max_new_tokens=20)
        seen[path] = [output.generated_tokens for output in outputs.values()]
    wishes = {"do_sample": True, "temperature": 0.9, "num_return_sequences": 2}
    outputs = generate_batch(model, prompts(3), continuous_batching_config=roomy(seed=7), max_new_tokens=10, **wishes)
    seen["sampled"] = [output.generated_tokens for output in outputs.values()]
    KVCache._copy = copy
    return {**seen, "moves": moves}


def managed(path: str, other: str) -> dict[str, Any]:
    """The manager by hand: requests from every rank, a stream, a cancel, a pause that changes weights, a second session with others."""
    model = load(path)
    manager = ContinuousBatchingManager(model, model.generation_config, roomy())
    seen: dict[str, Any] = {"driver": manager.is_tp_driver}
    manager.warmup()
    manager.start()
    seen["id"] = manager.add_request(prompts(1)[0], request_id="one")
    seen["ids"] = manager.add_requests(prompts(2))
    first = manager.get_result("one") if manager.is_tp_driver else None
    seen["one"] = first and first.generated_tokens
    if manager.is_tp_driver:
        for _ in seen["ids"]:
            manager.get_result()
        manager.add_request(prompts(1)[0], request_id="endless", max_new_tokens=400, streaming=True)
        endless = manager.request_id_iter("endless")
        next(endless)
    manager.cancel_request("endless")
    if manager.is_tp_driver:
        seen["cancelled"] = list(endless)[-1].status.name
    with manager.pause(), torch.no_grad():  # every rank changes its own copy
        model.model.norm.weight.mul_(-1.0)
    seen["again"] = manager.add_request(prompts(1)[0], request_id="after")
    after = manager.get_result("after") if manager.is_tp_driver else None
    seen["after"] = after and after.generated_tokens
    manager.stop(block=True)
    manager.start()
    seen["loaded"] = manager.update_weights(other).version  # every rank keeps its share
    seen["second"] = manager.add_request(prompts(1)[0], request_id="second")
    if manager.is_tp_driver:
        seen["second"] = manager.get_result("second").generated_tokens
    manager.stop(block=True)
    seen["left"] = manager.get_result()
    manager.destroy()
    return seen


def program(other: str, *paths: str) -> dict[str, Any]:
    return {"batches": batches(*paths), "managed": managed(paths[0], other)}


def stuck(path: str) -> dict[str, Any]:
    """The leader says when its request is under way; then somebody stops the other rank, and the leader's engine fails in seconds."""
    model = load(path)
    manager = ContinuousBatchingManager(model, model.generation_config, roomy(cpu_group_timeout=4.0))
    manager.start()
    if not manager.is_tp_driver:
        manager.join(0.0, None)
        return {}
    manager.add_request(prompts(1)[0], max_new_tokens=450, streaming=True)
    outputs = iter(manager)
    next(outputs)
    print("under way", flush=True)
    output = list(outputs)[-1]
    manager.join(0.0, None)
    return {"status": output.status.name, "error": str(output.error), "fatal": str(manager.fatal_error)}


if __name__ == "__main__":
    story, out, *arguments = sys.argv[1:]
    found = {"program": program, "stuck": stuck}[story](*arguments)
    (Path(out) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    if story == "stuck":
        os._exit(0)  # nobody is left to take leave of
    dist.destroy_process_group()
