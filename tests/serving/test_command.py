"""`cb-ray serve` as a user types it: one command, an answer, and a clean end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.serve
def test_cb_ray_serve_answers_and_ends(tiny_model_dir: Path, tmp_path: Path) -> None:
    """With the fast data plane it says where it serves, answers, and on SIGTERM ends with status 0 and no stack trace."""
    port = free_port()
    command = [sys.executable, "-m", "cb_ray.cli", "serve", str(tiny_model_dir), "--port", str(port)]
    command += ["--served-model-name", "tiny", "--set", "engine.page_size=8"]
    with (tmp_path / "stderr").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert server.stdout is not None
            said = next((line for line in server.stdout if "is served at" in line), "")
            assert said == f"tiny is served at http://127.0.0.1:{port}/v1; Ctrl-C ends it\n", (tmp_path / "stderr").read_text()
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=chat, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] <= 5
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=90)
        finally:
            server.kill()
            server.wait()
    assert server.returncode == 0
    errors = (tmp_path / "stderr").read_text()
    assert "stopping" in errors
    assert "SIGTERM received" not in errors
