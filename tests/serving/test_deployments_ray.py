"""Every file of `deployments/` on a real Ray: those for this machine answer a chat, those for GPUs say which resource is missing."""

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
from cb_ray.serving.ending import shut_down

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]
APP, DEPLOYMENTS = "cb-ray", Path(__file__).resolve().parents[2] / "deployments"
HERE = sorted(path.name for path in DEPLOYMENTS.glob("app*.yaml") if "gpu" not in path.name)
GPUS = sorted(path.name for path in DEPLOYMENTS.glob("app-gpu*.yaml"))


@pytest.fixture(scope="module")
def door() -> Iterator[str]:
    """A Ray of four CPUs that hides GPUs; the URL of Serve's HTTP proxy. Serve tells of what waits for resources after 1 s."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    changed = pytest.MonkeyPatch()
    changed.setenv("CUDA_VISIBLE_DEVICES", "")
    changed.setenv("RAY_SERVE_SLOW_STARTUP_WARNING_S", "1")
    changed.setenv("RAY_SERVE_SLOW_STARTUP_WARNING_PERIOD_S", "1")
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 * 2**20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        shut_down()
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


@pytest.mark.filterwarnings("ignore:The .metrics_interval_s. field:DeprecationWarning")  # in what the controller says back
@pytest.mark.parametrize("name", GPUS)
def test_a_file_for_gpus_says_what_is_missing(door, tiny_model_dir, name):
    """Without GPUs its engines wait to be placed: Serve names what a replica asks for, and the door is up meanwhile, not ready."""
    args: dict[str, Any] = {**args_of(name), "model": str(tiny_model_dir)}
    args["pool"]["graceful_shutdown_timeout_s"] = 1  # Serve waits as long for a replica that was never placed
    ranks = args["engine"].get("tensor_parallel_size", 1)
    serve.run_many([serve.RunTarget(build(args), name=APP, route_prefix="/")], wait_for_applications_running=False)
    try:
        while "GPU" not in (said := engine_message()):
            pass
        assert said.count('"GPU": 1.0') == ranks and "total resources available" in said, said
    finally:
        serve.delete(APP)


def engine_message() -> str:
    """What Serve says of the engines; asked of its controller."""
    app = serve.status().applications.get(APP)
    return "" if app is None or "Engine" not in app.deployments else app.deployments["Engine"].message
