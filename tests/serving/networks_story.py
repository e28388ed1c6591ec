"""What the first of two nodes runs in `test_networks_ray.py`: `networks_story.py ADDRESS OWN_IP MODEL SEEN`; writes what it saw to
SEEN as JSON, since Ray prints what its daemons say whenever it likes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import ray
from ray import serve
from ray.util.placement_group import placement_group_table

from cb_ray.messages import GenerateRequest, SamplingParams
from cb_ray.serving.app import Cluster, application, parse_args
from cb_ray.serving.ending import shut_down


async def read() -> list[int]:
    greedy = SamplingParams(do_sample=False, ignore_eos=True)
    asked = GenerateRequest(request_id="far", token_ids=(5, 6, 7, 8), max_new_tokens=12, sampling=greedy)
    tokens: list[int] = []
    async for chunk in serve.get_app_handle("cb-ray").options(stream=True).generate.remote(asked):
        assert chunk.error is None, chunk
        tokens += chunk.token_ids
    return tokens


def main(address: str, own_ip: str, model: str, seen: str) -> None:
    ray.init(address=address, _node_ip_address=own_ip)
    serve.start(proxy_location="Disabled")
    engine = {"tensor_parallel_size": 2, "placement_group_strategy": "STRICT_SPREAD", "num_cpus": 0.4, "num_threads": 1}
    engine |= {"page_size": 4, "num_blocks": 100, "dtype": "float32"}
    app = application(parse_args({"model": model, "engine": engine}), cluster=Cluster(num_cpus=2, num_gpus=0))
    serve.run(app, name="cb-ray", route_prefix="/")
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    (group,) = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    tokens = asyncio.run(read())
    shut_down()
    nodes = sorted(addresses[node] for node in group["bundles_to_node_id"].values())
    Path(seen).write_text(json.dumps({"nodes": nodes, "tokens": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
