"""Two machines as far as the network goes: Ray nodes in network namespaces of their own, with one wire between them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray")

from tests.tiny import make_model

pytestmark = [pytest.mark.serve, pytest.mark.timeout(200)]
ROOT, STORY = Path(__file__).resolve().parents[2], Path(__file__).with_name("networks_story.py")
IPS = ("10.213.7.1", "10.213.7.2")
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}  # what Ray asks of other nodes
ENVIRONMENT = {**os.environ, **TOKEN, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def networks() -> Iterator[tuple[str, str]]:
    """The names of two namespaces, each with an address of IPS, that reach each other and nothing else."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command `ip`")
    names = (f"cb-ray-{os.getpid()}-a", f"cb-ray-{os.getpid()}-b")
    with ExitStack() as made:
        try:
            for name in names:
                ip("netns", "add", name)
                made.callback(ip, "netns", "del", name)
            ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
            for name, address in zip(names, IPS, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
                for device in ("lo", "wire"):
                    ip("-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield names


def start_node(network: str, *words: str) -> subprocess.Popen[str]:
    """`ray start`, once it says that it runs. It ends, with all of its node, when it is terminated."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--object-store-memory=80000000"]
    command = ["ip", "netns", "exec", network, *ray, *words]
    node = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert node.stdout is not None
    said: list[str] = []
    for line in node.stdout:
        said.append(line)
        if "Ray runtime started" in line:
            return node
    node.communicate()
    raise AssertionError("".join(said))


def test_ranks_on_two_networks_find_each_other(networks, tiny_model_dir, tmp_path):
    """Each rank is on a node of its own, reachable by one address of several: the same tokens as one rank."""
    first, second = networks
    found = tmp_path / "seen.json"
    address = f"{IPS[0]}:6379"
    with ExitStack() as running:
        place = running.enter_context(
            tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)
        )  # paths of sockets are short
        for network, words in (
            (first, ("--head", f"--node-ip-address={IPS[0]}", "--port=6379", "--include-dashboard=false", f"--temp-dir={place}")),
            (second, (f"--address={address}", f"--node-ip-address={IPS[1]}")),
        ):
            node = start_node(network, *words)
            running.callback(node.communicate)
            running.callback(node.terminate)
        command = ["ip", "netns", "exec", first, sys.executable, str(STORY), address, IPS[0], str(tiny_model_dir), str(found)]
        ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    seen = json.loads(found.read_text())
    ids = torch.tensor([[5, 6, 7, 8]])
    alone = make_model("llama").generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert seen == {"nodes": list(IPS), "tokens": alone[0, 4:].tolist()}
