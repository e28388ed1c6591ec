"""The files of `deployments/` that need no GPU, as they stand, on a real Ray: each answers a chat."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("ray")

import httpx
import ray
from ray import serve

from cb_ray.serving.app import build

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]
APP, DEPLOYMENTS = "cb-ray", Path(__file__).resolve().parents[2] / "deployments"
HERE = sorted(path.name for path in DEPLOYMENTS.glob("app*.yaml") if "gpu" not in path.name)


@pytest.fixture(scope="module")
def door() -> Iterator[str]:
    """A Ray of four CPUs that hides GPUs; the URL of Serve's HTTP proxy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    changed = pytest.MonkeyPatch()
    changed.setenv("CUDA_VISIBLE_DEVICES", "")
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 * 2**20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        changed.undo()


def args_of(name: str) -> dict[str, Any]:
    (app,) = yaml.safe_load((DEPLOYMENTS / name).read_text(encoding="utf-8"))["applications"]
    return app["args"]


@pytest.mark.real
@pytest.mark.parametrize("name", HERE)
def test_a_file_for_this_machine_answers_a_chat(door, smollm2, name):
    """As it stands, with every model that it serves."""
    serve.run(build(args_of(name)), name=APP, route_prefix="/")
    try:
        models = [model["id"] for model in httpx.get(f"{door}/v1/models", timeout=60).json()["data"]]
        for model in models:
            chat = {"model": model, "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4, "temperature": 0}
            answer = httpx.post(f"{door}/v1/chat/completions", json=chat, timeout=120)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"]
    finally:
        serve.delete(APP)
