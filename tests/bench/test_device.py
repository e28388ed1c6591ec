"""`cb-ray bench device` where there is no GPU: it says so, and measures the host when told to. And what `make gpu` may import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cb_ray.bench import device

ROOT = Path(__file__).resolve().parents[2]
NOT_NEEDED = (
    "ray",
    "hypothesis",
    "psutil",
    "fastapi",
    "pydantic",
    "llguidance",
    "accelerate",
    "starlette",
    "gguf",
    "uvloop",
    "aiohttp",
)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.main([]) == 1
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_one_row_for_each_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """On the host, with a tiny shape: the figures are there and agree with each other."""
    arguments = "--shapes tiny --batches 2 --device cpu --dtype float32 --context 8 --steps 6 --no-peer --json"
    assert device.main([*arguments.split(), "--set", "num_blocks=64"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["batch"] == 2 and row["decode_tokens_per_s"] == pytest.approx(2e3 / row["step_ms"])
    assert 0 < row["host_us"] < 1e6 and 0 < row["roof_share"] < 10


def test_the_gpu_suite_needs_only_torch_transformers_and_pytest() -> None:
    """It is collected, and skips with its reason, where none of the other libraries is."""
    script = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({NOT_NEEDED!r}))\n"
        "import pytest, torch\n"
        "torch.cuda.is_available = lambda: False\n"
        "code = pytest.main(['-c', 'tests/gpu/pytest.ini', '-q', '-rs', '-p', 'no:cacheprovider', 'tests/gpu'])\n"
        "assert not any(name == 'ray' and module for name, module in sys.modules.items())\n"
        "sys.exit(code)"
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch sees no CUDA device" in done.stdout and "skipped" in done.stdout
