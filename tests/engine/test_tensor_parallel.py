"""Several ranks run one model: the same tokens as one, the same API on every rank, and one failure when one of them fails.

The ranks are real: `torchrun` starts them, gloo connects them. What they run is `ranks_story.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cb_ray.engine.generate import generate_batch
from cb_ray.errors import UnsupportedModelError
from cb_ray.runtime.ranks import check_heads
from tests.engine.ranks_story import prompts, roomy
from tests.tiny import save_model

ROOT = Path(__file__).resolve().parents[2]
STORY = Path(__file__).with_name("ranks_story.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}  # transformers takes a GPU wherever it sees one


def torchrun(size: int, story: str, out: Path, *arguments: object, **environment: str) -> list[dict[str, Any]]:
    """What each of `size` ranks saw, on CPUs unless `environment` says otherwise."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), str(STORY)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(
        [*command, story, str(out), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(size)]


def alone(path: object, token_ids: list[int], count: int) -> list[int]:
    """What one rank says, by the model's own code."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([token_ids])
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **settings)
    return out[0, len(token_ids) :].tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Three families: a head tied to the embedding, norms of heads, sliding windows with softcaps."""
    place, tied = tmp_path_factory.mktemp("models"), {"tie_word_embeddings": True}
    return [save_model(place / name, name, **(tied if name == "llama" else {})) for name in ("llama", "qwen3", "gemma2")]


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """Other weights for the first of them."""
    return save_model(tmp_path_factory.mktemp("other") / "llama", "llama", seed=1, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def seen(models, other, tmp_path_factory) -> list[dict[str, Any]]:
    return torchrun(2, "program", tmp_path_factory.mktemp("seen"), other, *models)


def test_two_ranks_give_the_tokens_of_one(models, seen):
    """Greedy in float32, token for token as `model.generate`, chunked, preempted and parked; seeded samples as one rank draws them.
    Every rank gets every output, and moves the same blocks.
    """
    leader, follower = (rank["batches"] for rank in seen)
    assert leader == follower and sum(leader["moves"]) > 0
    for path in models:
        assert leader[str(path)] == [alone(path, prompt, 20) for prompt in prompts()], path.name
    model = AutoModelForCausalLM.from_pretrained(models[-1], dtype=torch.float32)
    wishes = {"do_sample": True, "temperature": 0.9, "num_return_sequences": 2, "eos_token_id": -1}
    outputs = generate_batch(model, prompts(3), continuous_batching_config=roomy(seed=7), max_new_tokens=10, **wishes)
    assert leader["sampled"] == [output.generated_tokens for output in outputs.values()]


def test_every_rank_runs_the_same_program(models, other, seen):
    """transformers' API on all ranks: requests count on the leader alone, a pause holds all of them, a second session follows."""
    leader, follower = (rank["managed"] for rank in seen)
    before = alone(models[0], prompts(1)[0], 8)
    assert (leader["driver"], leader["id"], leader["one"]) == (True, "one", before)
    assert len(leader["ids"]) == 2 and leader["cancelled"] == "CANCELLED" and leader["left"] is None
    assert leader["after"] != before and leader["second"] == alone(other, prompts(1)[0], 8)
    nothing = dict.fromkeys(("id", "one", "again", "after", "second", "left"))
    assert follower == {"driver": False, "ids": [], "loaded": leader["loaded"], **nothing}


def test_a_rank_that_is_stuck_fails_the_engine(models, tmp_path):
    """A rank that is stopped in the middle of a request trips `cpu_group_timeout`: the request fails with the engine, and says why."""
    command = [sys.executable, str(STORY), "stuck", str(tmp_path), str(models[0])]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    ranks = [
        subprocess.Popen(
            command,
            env=ENVIRONMENT | ON_CPU | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].stdout is not None and ranks[0].stdout.readline() == b"under way\n"
        ranks[1].send_signal(signal.SIGSTOP)
        _, errors = ranks[0].communicate(timeout=60)
        assert ranks[0].returncode == 0, errors[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    seen = json.loads((tmp_path / "0.json").read_text())
    assert seen["status"] == "FAILED" and "Timed out" in seen["error"] and "Timed out" in seen["fatal"], seen


PLAN = {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.k_proj": "colwise"}


def config(heads: int, kv_heads: int) -> Any:
    text = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads, model_type="tiny")
    return SimpleNamespace(get_text_config=lambda decoder: text)


def test_heads_that_cannot_be_shared_out_are_refused_with_the_numbers():
    """SmolLM2 has 9 heads and 3 KV heads: 2 ranks are refused, 3 are not. A plan that leaves the heads alone divides nothing."""
    with pytest.raises(UnsupportedModelError, match="3 KV heads and 9 attention heads cannot be divided among 2 ranks.*: 1, 3"):
        check_heads(config(9, 3), PLAN, 2)
    with pytest.raises(UnsupportedModelError, match="2 KV heads cannot be divided among 4 ranks"):
        check_heads(config(16, 2), PLAN, 4)
    check_heads(config(9, 3), PLAN, 3)
    check_heads(config(9, 3), {"layers.*.mlp.experts": "moe_tp_experts"}, 2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_give_the_tokens_of_one(models, other, tmp_path):
    """The same program over NCCL: both ranks see the same, and greedy float32 tokens are those of `model.generate`."""
    leader, follower = torchrun(2, "program", tmp_path, other, *models, NCCL_DEBUG="WARN")
    assert leader["batches"] == follower["batches"]
    for path in models:
        assert leader["batches"][str(path)] == [alone(path, prompt, 20) for prompt in prompts()], path.name
