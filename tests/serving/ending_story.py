"""A process that starts Serve, leaves rubbish on its routing loop, ends Serve and Ray, and lives on. Run by test_ending_ray.py."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import ray
from ray import serve

from cb_ray.serving.ending import shut_down
from cb_ray.serving.replica_router import routing_loop


class Knot:
    """Held by itself, so that only the collector lets go of its reference to an object of Ray's."""

    def __init__(self, ref: Any) -> None:
        self.ref, self.itself = ref, self


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Echo:
    def __call__(self, said: str) -> str:
        return said


async def litter(refs: list[Any]) -> None:
    while True:
        if refs:
            Knot(refs.pop())
        gc.collect()
        await asyncio.sleep(0)


def main() -> None:
    ballast = [[number] for number in range(1_500_000)]  # to collect takes a while, and nearly every moment falls into it
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    echo = serve.run(Echo.bind(), route_prefix=None)
    assert echo.remote("here").result() == "here"
    loop = routing_loop()
    assert loop is not None
    running = asyncio.run_coroutine_threadsafe(litter([ray.put(number) for number in range(5000)]), loop)
    shut_down()
    assert gc.isenabled() and not running.done()
    assert asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "goes on"), loop).result(60) == "goes on"
    print("alive", len(ballast))


if __name__ == "__main__":
    main()
