"""What is done to an engine on its way from a name to a replica."""

from __future__ import annotations

import os
from threading import Thread

import pytest
import torch
from transformers import AutoModelForCausalLM

from cb_ray.engine.machine import widens_weights
from cb_ray.runtime.native import NativeOps, Unavailable, load
from cb_ray.serving import engine_loading
from cb_ray.serving.args import EngineArgs
from cb_ray.serving.engine_loading import give_way, load_model
from tests.tiny import make_model, save_model


def test_an_engine_on_the_cpu_gives_way_and_nobody_else_does():
    """The door and the Board share its cores: refusals took a second where engines went first. Only the engine's thread is slowed."""
    before, seen = os.getpriority(os.PRIO_PROCESS, 0), list[int]()

    def engine() -> None:
        give_way()
        give_way()
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = Thread(target=engine)
    thread.start()
    thread.join()
    assert seen == [max(10, before)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.parametrize(
    ("checkpoint", "multiplies", "widens", "asked", "expected"),
    [
        (torch.bfloat16, True, False, "auto", torch.bfloat16),
        (torch.bfloat16, False, True, "auto", torch.bfloat16),
        (torch.bfloat16, False, False, "auto", torch.float32),
        (torch.bfloat16, False, False, "bfloat16", torch.bfloat16),
        (torch.bfloat16, True, True, "float32", torch.float32),
        (torch.float16, True, True, "auto", torch.float32),
        (torch.float16, False, False, "float16", torch.float16),
        (torch.float32, True, True, "auto", torch.float32),
    ],
)
def test_a_cpu_computes_in_the_checkpoints_bfloat16_where_that_is_no_slower(
    tmp_path, monkeypatch, checkpoint, multiplies, widens, asked, expected
):
    """A processor without instructions for bfloat16 was given twice the bytes to read though our kernels widen as they read: a
    token took 33 ms where 18 would do."""
    path = save_model(tmp_path)
    AutoModelForCausalLM.from_pretrained(path, dtype=checkpoint).save_pretrained(path)
    monkeypatch.setattr(engine_loading, "multiplies_bfloat16", lambda: multiplies)
    monkeypatch.setattr(engine_loading, "widens_weights", lambda model: widens)
    model = load_model(str(path), EngineArgs(device="cpu", dtype=asked))
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


@pytest.mark.skipif(isinstance(load(), Unavailable), reason="no compiler here")
def test_kernels_widen_a_model_of_linears_and_not_one_of_other_products():
    """What torch itself would have to multiply in bfloat16 is slow without instructions for it: GPT-2's layers are no nn.Linear."""
    ops = load()
    assert isinstance(ops, NativeOps)
    llama, gpt2 = make_model("llama"), make_model("gpt2")
    assert widens_weights(llama) == (ops.level != "portable")
    assert not widens_weights(gpt2)
    with ops.at_level("portable"):
        assert not widens_weights(llama)
