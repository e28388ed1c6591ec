"""`cb-ray serve` as a user types it: one command, an answer, and a clean end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.serve
@pytest.mark.parametrize(("from_file", "end"), [(False, signal.SIGINT), (True, signal.SIGTERM)])
def test_cb_ray_serve_answers_and_ends(from_file: bool, end: signal.Signals, tiny_model_dir: Path, tmp_path: Path) -> None:
    """A model, or a file's applications: it answers, and a signal ends it and all it started, status 0, with no stack trace.

    SIGTERM under a file printed the stack of Ray's handler and ended with status 15.
    """
    port = free_port()
    command = [sys.executable, "-m", "cb_ray.cli", "serve"]
    settings = ["--port", str(port), "--served-model-name", "tiny", "--set", "engine.page_size=8"]
    if from_file:
        file = tmp_path / "app.yaml"
        subprocess.run([*command, str(tiny_model_dir), *settings, "--save", str(file), "--check"], check=True)
        command += [str(file)]
    else:
        command += [str(tiny_model_dir), *settings]
    with (tmp_path / "stderr").open("w") as log:
        told = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children would ignore it
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        signal.signal(signal.SIGINT, told)
        try:
            assert server.stdout is not None
            sign = "Submitted deploy config" if from_file else "is served at"
            said = next((line for line in server.stdout if sign in line), "")
            if not from_file:
                assert said == f"tiny is served at http://127.0.0.1:{port}/v1; Ctrl-C ends it\n", (
                    tmp_path / "stderr"
                ).read_text()
            while from_file and not is_up(f"http://127.0.0.1:{port}/v1/models"):
                assert server.poll() is None, (tmp_path / "stderr").read_text()
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=chat, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] <= 5
            started = psutil.Process(server.pid).children(recursive=True)
            assert started
            server.send_signal(end)
            server.communicate(timeout=90)
        finally:
            server.kill()
            server.wait()
    errors = (tmp_path / "stderr").read_text()
    assert server.returncode == 0, errors
    assert "stopping" in errors
    assert "SIGTERM received" not in errors and "Traceback" not in errors, errors
    _, left = psutil.wait_procs(started, timeout=30)
    assert not left, left


def is_up(url: str) -> bool:
    try:
        return httpx.get(url, timeout=60).status_code == 200
    except httpx.TransportError:
        return False
