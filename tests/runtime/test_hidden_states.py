"""Embeddings: the hidden state of a prompt's last token, whatever else is in the batch and however the model is run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cb_ray.errors import NotSupportedError
from cb_ray.messages import SamplingParams
from tests.runtime.driving import random_prompts, run
from tests.tiny import make_model

EMBED = SamplingParams(do_sample=False, embed=True)
SMALL = {"num_blocks": 64, "page_size": 8, "max_batch_tokens": 24}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_last_hidden_state_at_length_one(family: str) -> None:
    """Chunked prefill, shared prefixes and neighbours that generate change nothing about it; nothing is generated for it."""
    model = make_model(family)
    prompts = random_prompts([40, 7, 25])
    prompts.append(prompts[0])  # its pages are cached
    sampling = [EMBED, replace(EMBED, embed=False), EMBED, EMBED]
    chunks, _ = run(model, prompts, 9, sampling=sampling, **SMALL)
    for chunk, prompt in zip(chunks, prompts, strict=True):
        if chunk.request_id == "r1":
            assert chunk.embedding is None and len(chunk.token_ids) == 9
            continue
        with torch.no_grad():
            state = model.base_model(torch.tensor([prompt])).last_hidden_state[0, -1]
        assert chunk.embedding is not None and chunk.token_ids == () and chunk.finish_reason == "stop"
        torch.testing.assert_close(torch.tensor(chunk.embedding), torch.nn.functional.normalize(state, dim=0), atol=2e-5, rtol=0)
        assert chunk.usage is not None and chunk.usage.num_generated_tokens == 0


def test_a_model_whose_hidden_states_cannot_be_seen_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request fails alone; its neighbour is answered."""
    model = make_model("llama")
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda self: None)
    (bad, good), _ = run(model, random_prompts([5, 6]), 3, sampling=[EMBED, replace(EMBED, embed=False)], **SMALL)
    assert isinstance(bad.error, NotSupportedError) and len(good.token_ids) == 3
