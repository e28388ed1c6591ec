"""Ray, Serve and the app on them, for as long as a benchmark takes: deployed, redeployed, looked at, broken, and always shut down.

Owns `Sitting` and how cores are divided: engines have theirs and everything else (client, proxy, Routers, Board, Ray) has the
others, as in a cluster whose engines live on devices of their own. Knows Ray and the application; no scenario.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from . import replica as inside

APP = "cb-ray"
MODEL = "bench"  # as clients call it


def divide(cores: Sequence[int], replicas: int) -> tuple[list[int], list[int]]:
    """(cores of the door, cores of the engines): up to one for each engine, at most half. Of one core, all share it."""
    ordered = sorted(cores)
    count = min(replicas, len(ordered) // 2)
    return (ordered[:-count], ordered[-count:]) if count else (ordered, [])


def merged(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with `more` laid over them, group by group."""
    both = dict(settings)
    for name, value in more.items():
        old = both.get(name)
        both[name] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


class Sitting:
    """One Ray on this machine with the app on it. Use `open`."""

    def __init__(self, model: Path, replicas: int, port: int) -> None:
        self.model, self.replicas, self.port = model, replicas, port
        self.door, self.engines = divide(tuple(os.sched_getaffinity(0)), replicas)
        self.settings: dict[str, Any] = {}
        self._args: dict[str, Any] = {}  # of `build`
        self._engine: dict[str, Any] = {}  # Serve options laid over those that `build` gives

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, model: Path, replicas: int) -> AsyncGenerator[Sitting]:
        """Ray and Serve started, nothing deployed yet; both are gone afterwards, however the block ends."""
        import ray
        from ray import serve

        from ...serving.ending import shut_down

        sitting = cls(model, replicas, free_port())
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, sitting.door)
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            with tempfile.TemporaryDirectory(prefix="cb-ray-bench-") as scratch:
                ray.init(
                    num_cpus=4 * replicas,
                    num_gpus=0,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=256 * 2**20,
                    namespace="cb-ray-bench",
                    _temp_dir=os.environ.get("RAY_TMPDIR") or scratch,
                )
                try:
                    http = {"host": "127.0.0.1", "port": sitting.port}
                    quiet = {"log_level": "INFO", "enable_access_log": False}
                    await asyncio.to_thread(serve.start, http_options=http, logging_config=quiet)
                    logging.getLogger("ray.serve").setLevel(logging.ERROR)
                    yield sitting
                finally:
                    shut_down()
        finally:
            os.sched_setaffinity(0, before)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/completions"

    def base(self) -> dict[str, Any]:
        """Settings of every scenario: engines of one thread each, that notice trouble within seconds."""
        return {
            "model": str(self.model),
            "served_model_name": MODEL,
            "pool": {
                "min_replicas": self.replicas,
                "max_replicas": self.replicas,
                "health_check_period_s": 1,
                "step_timeout_s": 10,
                "lease_timeout_s": 10,
                "graceful_shutdown_timeout_s": 120,
            },
            "engine": {"device": "cpu", "dtype": "float32", "num_cpus": 0.1, "num_threads": 1, "page_size": 16},
        }

    async def deploy(self, changes: Mapping[str, Any], replicas: int | None = None, fountain: int | None = None) -> None:
        """The app with `changes` to the base settings. Returns when it runs, `replicas` with it (default: as many as the settings
        say), and those it replaces are gone. `fountain`: engines that compute nothing."""
        await self.start_deploying(changes, fountain)
        await self.whole(replicas)

    async def start_deploying(self, changes: Mapping[str, Any], fountain: int | None = None) -> None:
        """As `deploy`, but does not wait."""
        self.settings = merged(self.base(), changes)
        self._args = {"settings": self.settings, "cores": self.engines, "replicas": self.replicas, "fountain": fountain}
        self._engine = {}
        await self._apply()

    async def adjust(self, **options: Any) -> None:
        """Other Serve options for the Engine deployment, such as another number of replicas: nothing restarts. Does not wait."""
        self._engine |= options
        await self._apply()

    async def _apply(self) -> None:
        """As `serve run FILE` and KubeRay do it: what stands under `args` is part of the version, what is beside it is not.
        (`serve.run` from Python gives everything a new version every time.)"""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        app: dict[str, Any] = {"name": APP, "route_prefix": "/", "import_path": f"{__name__}:build", "args": self._args}
        if self._engine:
            app["deployments"] = [{"name": "Engine", **self._engine}]
        logs = {"log_level": "INFO", "enable_access_log": False}
        schema = ServeDeploySchema.model_validate({"applications": [app], "logging_config": logs})
        client: Any = _get_global_client()
        await asyncio.to_thread(client.deploy_apps, schema)

    async def whole(self, replicas: int | None = None) -> None:
        """Wait until so many replicas run (default: as many as were asked for), and none starts or stops. Raises RuntimeError when
        Serve gives up."""
        asked = self._engine.get("num_replicas", self.settings["pool"]["max_replicas"])
        wanted = asked if replicas is None else replicas
        async for _ in ticks(0.25):
            app, alive = await self.status(), await asyncio.to_thread(self.names, "Engine")
            if app.status == "DEPLOY_FAILED":
                raise RuntimeError(f"Serve could not deploy the app: {app.message}")
            states = replica_states(app)
            # Serve learns late of a death; that an actor is there says nothing of its being ready
            engines = len(alive) == wanted and states.get("Engine", {}) == ({"RUNNING": wanted} if wanted else {})
            routers = set(states.get("Router", {})) == {"RUNNING"}
            if app.status == "RUNNING" and engines and routers and await asyncio.to_thread(_num_boards) == 1:
                return

    async def status(self) -> Any:
        """What Serve says of the app."""
        from ray import serve

        return (await asyncio.to_thread(serve.status)).applications[APP]

    async def board(self) -> Any:
        """The Board's actor. Raises RuntimeError while there is none."""
        from ...serving.replica_router import find_board

        board = await asyncio.to_thread(find_board, APP, "Engine")
        if board is None:
            raise RuntimeError("the pool has no Board")
        return board

    async def snapshot(self) -> dict[str, Any]:
        """The Board's books; waits for a Board that is on its way."""
        from ray.exceptions import RayActorError

        async for _ in ticks(0.1):
            with contextlib.suppress(RayActorError, RuntimeError):
                return await (await self.board()).snapshot.remote()
        raise AssertionError

    async def call(self, deployment: str, function: Callable[..., Any], replica: str = "") -> dict[str, Any]:
        """What `function(actor)` gives in the replicas of a deployment, by replica; in one of them if `replica` is named."""
        actors = await asyncio.to_thread(_replicas_of, deployment)
        chosen = {name: actor for name, actor in actors.items() if replica in ("", name)}
        return {name: await actor.__ray_call__.remote(function) for name, actor in chosen.items()}

    def names(self, deployment: str) -> set[str]:
        """The unique ids of the replicas that have an actor. Blocks for a moment."""
        return set(_named(deployment))

    async def kill(self, deployment: str, replica: str) -> None:
        """SIGKILL."""
        os.kill((await self.call(deployment, inside.pid, replica))[replica], signal.SIGKILL)


def build(args: dict[str, Any]) -> Any:
    """The application that a benchmark deploys: the ordinary one, with `load` of `replica.py`."""
    from ...serving.app import Cluster, application, parse_args
    from . import plane

    load = partial(inside.load, cores=tuple(args["cores"]))
    if args["fountain"]:
        load = partial(plane.load, piece=args["fountain"])
    return application(parse_args(args["settings"]), cluster=Cluster(num_cpus=args["replicas"], num_gpus=0), load=load)


def replica_states(app: Any) -> dict[str, dict[str, int]]:
    """Replicas by deployment and state, in what Serve says of an app; those with none are left out."""
    return {
        name: {str(getattr(state, "value", state)): count for state, count in deployment.replica_states.items() if count}
        for name, deployment in app.deployments.items()
    }


def _replicas_of(deployment: str) -> dict[str, Any]:
    """Actor handles by the replica's unique id."""
    import ray

    return {name: ray.get_actor(actor["name"], namespace=actor["namespace"]) for name, actor in _named(deployment).items()}


def _num_boards() -> int:
    """Two while one version takes the place of another."""
    import ray

    listed: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return sum(f"::{APP}::Engine::" in actor["name"] and actor["name"].endswith("::board") for actor in listed)


def _named(deployment: str) -> dict[str, dict[str, str]]:
    import ray

    mark = f"{APP}#{deployment}#"
    listed: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"].partition(mark)[2]: actor for actor in listed if mark in actor["name"]}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def after(seconds: float) -> None:
    """A measurement's length."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    timer = loop.call_later(seconds, over.set_result, None)
    try:
        await over
    finally:
        timer.cancel()


async def ticks(interval_s: float) -> AsyncGenerator[float]:
    """The event loop's time, now and every so many seconds: for sampling what announces nothing."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        yield loop.time()
        due = max(due + interval_s, loop.time())
        await after(due - loop.time())
