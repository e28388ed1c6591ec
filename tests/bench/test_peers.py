"""`cb-ray bench peers`: the same requests through two engines that are here, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cb_ray.bench import peers


@pytest.mark.parametrize("engine", ["cb_ray", "transformers"])
def test_every_engine_makes_all_tokens(
    engine: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each number of requests, each pass counted; the first is cold and not in the median."""
    file = tmp_path / "work.json"
    file.write_text(json.dumps([{"prompt_ids": [3, 4, 5], "max_tokens": 4}, {"prompt_ids": [6], "max_tokens": 3}]))
    arguments = ["--model", str(tiny_model_dir), "--work", str(file), "--dtype", "float32", "--passes", "3"]
    assert peers.main([engine, *arguments, "--requests", "1", "2"]) == 0
    one, two = map(json.loads, capsys.readouterr().out.splitlines()[-2:])
    assert (one["requests"], one["tokens"]) == (1, 4) and (two["requests"], two["tokens"]) == (2, 7)
    assert len(two["tokens_per_s"]) == 3 and two["warm_median"] == max(two["tokens_per_s"][1:])
