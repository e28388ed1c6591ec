"""Serve's request router for the Engine's handle: asks the Board which replica a request may go to.

Owns `BoardRouter`, and with `watch_replicas`, `find_board` and `routing_loop` every use of Ray Serve's private API; a contract test
runs against the installed Ray. One `BoardRouter` lives in every process that has a handle to the Engine, so HTTP, handle calls and
tasks obey the same Board. Without a Board it decides alone, by the work it has itself sent to each replica, until the Board is back.

    handle.generate.remote(request=…) ─▶ _choose_replica_for_request ─▶ Board: granted │ wait │ QueueFullError
                                     ◀── on_request_routed: the replica took it; released when its result is done or dropped
                                     ◀── asked again (is_retry): the replica said no; the grant is given back and asked for anew
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError
from ray.serve._private.common import DeploymentTargetInfo, ReplicaID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_DEPLOYMENT_ACTOR_PREFIX, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace
from ray.serve._private.replica_result import ReplicaResult
from ray.serve._private.router import SingletonThreadRouter
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from ..digests import page_digests
from ..errors import NoReplicaError, QueueFullError, RequestTimeoutError
from ..messages import GenerateRequest
from ..routing.loads import Ask
from ..routing.pool import PoolLimits
from .board_client import BoardClient, BoardLostError

logger = logging.getLogger("ray.serve")

BOARD = "board"  # the Board's name among the deployment's actors
_STANDING_S = 2.0  # how long a Board may take to say whether it is in charge
_UNKNOWN_REPLICA_S = 5.0  # how long to wait for Serve's news of a replica that the Board already knows


class BoardRouter(FIFOMixin, RequestRouter):
    """See the module. `limits` are the fields of `PoolLimits`: for a Board that no replica has told yet, and for none at all."""

    def initialize_state(self, limits: Mapping[str, Any]) -> None:
        self._limits = PoolLimits(**limits)
        self._client = BoardClient(self._find_board, self._limits)
        self._board_name: str | None = None
        self._page_size: int | None = None
        self._work: Counter[str] = Counter()  # tokens of work that this process has at each replica …
        self._running: Counter[str] = Counter()  # … in so many requests
        self._waiting_alone = 0

    # called by Serve

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        facts = [replica.replica_metadata for replica in replicas if replica.replica_metadata.get("board")]
        if facts:
            newest = max(facts, key=lambda fact: fact.get("since", 0.0))
            self._page_size = newest.get("page_size")
            if newest["board"] != self._board_name:
                self._board_name = newest["board"]
                self._client.move_on()

    async def _choose_replica_for_request(self, pending_request: PendingRequest, *, is_retry: bool = False) -> RunningReplica:
        request = pending_request.kwargs.get("request")
        if not isinstance(request, GenerateRequest):  # stats and the like: no work, no lease
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        if is_retry:
            self._give_back(pending_request, rejected=True)
        try:
            async with asyncio.timeout(request.timeout_s):
                return await self._choose(pending_request, request, is_retry)
        except TimeoutError as error:
            raise RequestTimeoutError(request.timeout_s or 0.0) from error

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Without the Board: the replica to which this process has sent the least work, then the next."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # otherwise full replicas are asked in a hot loop
        return [[r] for r in sorted(candidate_replicas, key=lambda r: self._work[r.replica_id.unique_id])]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """The replica took the request. Its end, or its result being dropped unread, releases the lease."""
        request = pending_request.kwargs.get("request")
        if not isinstance(request, GenerateRequest):
            return
        name, loop, client = replica_id.unique_id, self._event_loop, self._client
        work = len(request.token_ids) + (request.max_new_tokens or 0)
        ticket = _take_ticket(pending_request)
        if ticket is None:  # routed without the Board
            ticket = client.new_ticket()
            client.hold(ticket, request.request_id, name)
        self._work[name] += work
        self._running[name] += 1

        def over() -> None:
            self._work[name] -= work
            self._running[name] -= 1
            client.release(ticket)

        def done(_: Any) -> None:
            dropped.detach()
            with contextlib.suppress(RuntimeError):  # the loop is closed: this process is on its way out
                loop.call_soon_threadsafe(over)

        # A caller that drops its generator, or a task that returns with one open, would leave the stream running to its end.
        dropped = weakref.finalize(result, _cancel, getattr(result, "_obj_ref_gen", None))
        dropped.atexit = False
        result.add_done_callback(done)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._client.lost(replica_id.unique_id)

    # inside

    async def _choose(self, pending: PendingRequest, request: GenerateRequest, is_retry: bool) -> RunningReplica:
        deadline = self._event_loop.time() + self._limits.cold_start_timeout_s
        while self._event_loop.time() < deadline:
            ask = self._ask(request, readmit=is_retry or request.resumed_tokens > 0 or bool(pending.kwargs.get("attempt")))
            try:
                grant = await self._client.acquire(ask)
            except BoardLostError:
                return await self._choose_alone(pending, is_retry)
            _put_ticket(pending, ask.ticket)
            if grant.waited_s:
                pending.kwargs["queued_s"] = grant.waited_s  # the engine tells it with the usage, as part of the queue time
            _on_end_of_task(lambda: self._give_back(pending))
            replica = await self._replica(grant.replica)
            if replica is not None:
                return replica
            self._give_back(pending, rejected=True)
            is_retry = True
        raise NoReplicaError(f"no replica took the request within {self._limits.cold_start_timeout_s:g} s")

    def _ask(self, request: GenerateRequest, readmit: bool) -> Ask:
        digests = request.digests
        if not digests and self._page_size:
            digests = page_digests(request.token_ids, self._page_size, request.cache_salt)
        return Ask(
            ticket=self._client.new_ticket(),
            request_id=request.request_id,
            holder=self._client.holder,
            num_tokens=len(request.token_ids),
            max_new_tokens=request.max_new_tokens,
            digests=digests,
            priority=request.priority,
            session=request.session,
            readmit=readmit,
        )

    async def _choose_alone(self, pending: PendingRequest, is_retry: bool) -> RunningReplica:
        """Serve's own way, ranked by `choose_replicas`. The bound on those who wait holds for this process alone."""
        slots = {
            r.replica_id.unique_id: int(r.replica_metadata.get("slots", r.max_ongoing_requests)) for r in self._replicas_list
        }
        room = sum(max(0, count - self._running[name]) for name, count in slots.items())
        waiting, limit = self._waiting_alone - room, self._limits.max_queue_size
        if limit and not is_retry and waiting >= limit:
            raise QueueFullError(waiting, limit)
        self._waiting_alone += 1
        try:
            async with asyncio.timeout(None if self._replicas else self._limits.cold_start_timeout_s):
                return await super()._choose_replica_for_request(pending, is_retry=is_retry)
        except TimeoutError as error:
            raise NoReplicaError(f"no replica came up within {self._limits.cold_start_timeout_s:g} s") from error
        finally:
            self._waiting_alone -= 1

    async def _replica(self, name: str) -> RunningReplica | None:
        """The replica that the Board named. The Board may hear of a new one a moment before this process does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_UNKNOWN_REPLICA_S):
                while True:
                    for replica_id, replica in self._replicas.items():
                        if replica_id.unique_id == name:
                            return replica
                    self._replicas_updated_event.clear()
                    await self._replicas_updated_event.wait()
        return None

    def _give_back(self, pending: PendingRequest, rejected: bool = False) -> None:
        ticket = _take_ticket(pending)
        if ticket is not None:
            self._client.release(ticket, rejected=rejected)

    async def _find_board(self) -> Any | None:
        name, self_id = self._board_name, self._deployment_id
        found = await self._event_loop.run_in_executor(None, find_board, self_id.app_name, self_id.name, name)
        if found is None:
            logger.warning("The Board of %s cannot be found; routing by local work until it is back.", self_id.name)
        return found


def find_board(app: str, deployment: str, name: str | None = None) -> Any | None:
    """A handle to a Board's actor: the one of that name, else any of the deployment's. Blocks for a moment."""
    if not ray.is_initialized():  # Serve's local testing mode, where there are no actors
        return None
    if name is not None:
        return _actor(name)
    found = [board for board in map(_actor, _names_of_boards(app, deployment)) if board is not None]
    return found[0] if len(found) == 1 else _in_charge(found)


def _in_charge(boards: list[Any]) -> Any | None:
    """While a new version of the application rolls out, there are two Boards: the newest one with running replicas decides."""
    told: list[tuple[tuple[bool, float], Any]] = []
    for board in boards:
        with contextlib.suppress(RayActorError, GetTimeoutError):
            told.append((ray.get(board.standing.remote(), timeout=_STANDING_S), board))
    return max(told, key=lambda pair: pair[0], default=(None, None))[1]


def other_boards(app: str, deployment: str, name: str) -> list[Any]:
    """Boards of the same deployment besides the one of that name: of the version that a new one takes over from. Blocks a moment."""
    found = [_actor(other) for other in _names_of_boards(app, deployment) if other != name]
    return [board for board in found if board is not None]


def _names_of_boards(app: str, deployment: str) -> list[str]:
    prefix, suffix = f"{SERVE_DEPLOYMENT_ACTOR_PREFIX}{app}::{deployment}::", f"::{BOARD}"
    listed: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    actors: list[str] = [actor["name"] for actor in listed if actor["namespace"] == SERVE_NAMESPACE]
    return [actor for actor in actors if actor.startswith(prefix) and actor.endswith(suffix)]


def _actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=SERVE_NAMESPACE)
    except ValueError:
        return None


def watch_replicas(heard: Callable[[Sequence[tuple[str, dict[str, object]]]], None]) -> LongPollClient:
    """Call `heard` with (name, metadata) of all running replicas of the deployment actor that calls this, now and on change.

    Must be called on the actor's event loop; `heard` runs there. The returned client must be kept.
    """
    context = serve.get_deployment_actor_context()

    def targets_changed(targets: DeploymentTargetInfo) -> None:
        heard([(info.replica_id.unique_id, dict(info.replica_metadata)) for info in targets.running_replicas])

    listeners: dict[Any, Callable[[Any], None]] = {(LongPollNamespace.DEPLOYMENT_TARGETS, context.deployment_id): targets_changed}
    return LongPollClient(
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE),
        listeners,
        call_in_event_loop=asyncio.get_running_loop(),
        client_id=f"cb-ray board {ray.get_runtime_context().get_actor_id()}",
    )


def routing_loop() -> asyncio.AbstractEventLoop | None:
    """The loop, in a thread of its own, on which all handles of this process are routed; None before the first. It is never closed."""
    return SingletonThreadRouter._asyncio_loop


def _put_ticket(pending: PendingRequest, ticket: str) -> None:
    pending.cb_ray_ticket = ticket  # type: ignore[attr-defined]


def _take_ticket(pending: PendingRequest) -> str | None:
    ticket = getattr(pending, "cb_ray_ticket", None)
    pending.cb_ray_ticket = None  # type: ignore[attr-defined]
    return ticket


def _on_end_of_task(call: Callable[[], None]) -> None:
    """The task that routes may be cancelled, or fail, between the grant and the replica's answer."""
    task = asyncio.current_task()
    if task is not None:
        task.add_done_callback(lambda _: call())


def _cancel(stream: Any | None) -> None:
    if stream is not None:
        with contextlib.suppress(Exception):  # the stream has ended, or the process is going down
            ray.cancel(stream)
