"""`cb-ray bench offline` on a tiny model: every workload and both ways of reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cb_ray.bench import offline
from cb_ray.errors import ConfigError

WORK = [
    {"prompt_ids": [1, 2, 3], "max_tokens": 5},
    {"prompt": "hello there", "max_tokens": 4},
    {"prompt_ids": [7], "max_tokens": 3},
]


def run(model: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert offline.main(["--model", str(model), "--dtype", "float32", "--passes", "1", *arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("way", [[], ["--stream", "2"]])
def test_a_file_is_run_whole_or_streamed(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], way: list[str]
) -> None:
    """All tokens asked for are made and counted, whichever way they are read; text is tokenized first."""
    file = tmp_path / "work.json"
    file.write_text(json.dumps(WORK))
    seen = run(tiny_model_dir, capsys, "--work", str(file), *way)
    assert seen["requests"] == 3 and seen["passes"][0]["tokens"] == 12
    assert ("ttft_s" in seen["passes"][0]) is bool(way)


def test_random_requests_share_what_is_asked(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A common beginning is found in the cache by those who come later."""
    seen = run(tiny_model_dir, capsys, "--requests", "12", "--shared-prefix", "64", "--engine", '{"max_requests_per_batch": 2}')
    assert seen["passes"][0]["cached_tokens"] > 0


def test_messages_are_for_http(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "work.json").write_text('[{"messages": [{"role": "user", "content": "hi"}]}]')
    with pytest.raises(ConfigError, match="bench serve"):
        offline.main(["--model", str(tiny_model_dir), "--work", str(tmp_path / "work.json")])
