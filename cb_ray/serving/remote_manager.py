"""`RemoteManager`: the methods of `ContinuousBatchingManager` over a whole pool, from any task, actor or driver of its Ray cluster.

Owns the connection to one application. Code written for one process moves to N replicas by changing the line that makes the
manager. Importing this file needs no Ray; making a `RemoteManager` does.

    manager = cb_ray.RemoteManager("cb-ray")          # was: cb_ray.init_continuous_batching(model); manager.start()
    for output in manager.request_id_iter(manager.add_request(prompt, streaming=True)): …
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..engine.intake import Terms
from ..engine.mailbox import Outbox, Results
from ..engine.request_side import RequestSide
from ..errors import ConfigError, EngineStoppedError, InvalidRequestError, NoReplicaError
from ..messages import GenerationOutput
from .args import engines_of
from .remote_streams import Courier, Dispatch, RemoteIntake

if TYPE_CHECKING:
    from types import TracebackType

    from ..engine.weights_source import WeightsSource
    from ..routing.weights import InFlight, Mode
    from .board_weights import PoolWeights

logger = logging.getLogger(__name__)


class RemoteManager(RequestSide):
    """Requests for the pool of the application `app`, of its `model` where it serves several. It is started when it is made; `with`
    stops it at the end.

    Streams survive the death of replicas, up to `max_failovers` times each. Ids that are not given are unique in the pool. Times in
    outputs are of the clocks of the machines that made them. Raises ConfigError when Ray is not connected or has no such
    application, NoReplicaError when no replica comes up to say what it serves.
    """

    def __init__(self, app: str = "cb-ray", *, model: str | None = None, max_failovers: int = 3) -> None:
        from .pool_view import view_of

        self.app, self._deployment = app, engines_of(model)
        self._results = Results()
        self._outbox = Outbox(self._results, prefix=f"{uuid.uuid4().hex[:12]}_")
        self._view = view_of(app, self._deployment)
        self._courier = Courier(self._view, self._outbox)
        self._end = weakref.finalize(self, self._courier.close)  # a manager that is dropped leaves no stream behind
        try:
            terms = self._courier.run(self._connect(max_failovers))
        except BaseException:
            self._end()
            raise
        self._inbox = Dispatch(self._courier)
        self.num_return_sequences = terms.policy.num_return_sequences
        self._intake = RemoteIntake(
            policy=terms.policy, limits=terms.limits, inbox=self._inbox, outbox=self._outbox, clock=time.perf_counter
        )
        self._running = True
        self._results.open()

    async def _connect(self, max_failovers: int) -> Terms:
        import ray
        from ray import serve

        from .handle_source import HandleSource, own_error
        from .steady_source import SteadySource

        if not ray.is_initialized():
            raise ConfigError("this process is in no Ray cluster; call ray.init(address='auto') first", field="app")
        try:
            self._engines = serve.get_deployment_handle(self._deployment, self.app)
        except Exception as error:
            raise ConfigError(
                f"the cluster has no {self._deployment!r} in an application {self.app!r} ({error}); `serve status` lists what runs",
                field="app",
            ) from error
        self._courier.connect(SteadySource(HandleSource(self._engines), max_failovers))
        try:
            return await self._engines.terms.remote()
        except Exception as error:
            raise own_error(error) from error

    # ---- life ---------------------------------------------------------------------------------------------------------------

    def is_running(self) -> bool:
        """Whether requests are taken. The pool itself runs whether anybody does this or not."""
        return self._running

    def start(self) -> None:
        """Take requests again after a `stop`. Raises EngineStoppedError after `destroy`."""
        if not self._end.alive:
            raise EngineStoppedError("this manager was destroyed; make a new one")
        self._running = True
        self._inbox.reopen()
        self._results.open()

    def warmup(self) -> None:
        """Nothing to do: replicas warm up before they serve."""

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no more requests here, and let those under way end (`hard_stop`: fail them with what they have).

        The pool goes on serving others. `block` waits until all have ended, `timeout` seconds at most; readers of outputs are told
        then that no more will come. `keep_for_next_session` has no meaning here: caches are the pool's.
        """
        self._running = False
        self._inbox.refuse("the remote manager is stopped; start it first")
        if hard_stop:
            self._courier.stop(EngineStoppedError("the remote manager was stopped hard (HARD_STOP); send the request again"))
        if block:
            self.join(time.perf_counter(), timeout)

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait until every request has ended. `stop_trigger_time` is the perf_counter reading that the logged duration starts at."""

        async def ended() -> None:
            async with asyncio.timeout(timeout):
                await self._courier.drained()
            if not self._running:
                self._results.close()

        try:
            self._courier.run(ended())
        except TimeoutError:
            logger.warning("requests are still under way after %g s; they go on", timeout or 0.0)
        else:
            logger.info("all requests ended %.3f s after stop", time.perf_counter() - stop_trigger_time)

    def destroy(self) -> None:
        """Fail what is under way and close the connection. Final; may be called again."""
        self._running = False
        self._inbox.refuse("this manager was destroyed")
        self._end()
        self._courier.join()
        self._results.close()

    def __enter__(self) -> RemoteManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop(hard_stop=kind is not None)
        self.destroy()

    # ---- whole batches ------------------------------------------------------------------------------------------------------

    def generate_batch(
        self,
        inputs: Iterable[Iterable[int]],
        max_new_tokens: int | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = True,
        *,
        eos_token_id: int | list[int] | None = None,
        priority: int = 0,
        cache_salt: str = "",
        **sampling: Any,
    ) -> dict[str, GenerationOutput]:
        """Generate from all `inputs`, however many; outputs by request id, in input order. A prompt that cannot be served is FAILED
        in the result, with `error` set; the others finish.

        At most as many requests are in the pool as keep it busy: a full pool is waited for, and half of its waiting line is left
        to others. Interrupting it cancels what is under way. Raises EngineStoppedError after `stop`.
        """
        prompts = list(inputs)
        count = len(prompts) * self.num_return_sequences
        with tqdm(total=count, desc="generating", unit="request", disable=not progress_bar) as bar:
            outputs = self.run_batch(
                prompts,
                bar.update,
                max_new_tokens=max_new_tokens,
                record_timestamps=record_timestamps,
                eos_token_id=eos_token_id,
                priority=priority,
                cache_salt=cache_salt,
                sampling=sampling,
            )
        for output in outputs.values():
            if output.error is not None:
                logger.error("request %s failed: %s", output.request_id, output.error)
        return outputs

    # ---- weights ------------------------------------------------------------------------------------------------------------

    def update_weights(
        self,
        source: WeightsSource,
        *,
        mode: Mode = "rolling",
        in_flight: InFlight = "keep",
        weights_version: int | None = None,
    ) -> PoolWeights:
        """Bring every replica to other weights; returns when all have them (see `PoolView.update_weights`).

        Interrupting it does not stop the update. Raises WeightsError when a replica refuses (all have the old weights then),
        UpdateRunningError beside another update, InvalidRequestError and NoReplicaError.
        """
        return self._courier.run(
            self._view.update_weights(source, mode=mode, in_flight=in_flight, weights_version=weights_version)
        )

    @contextmanager
    def pause(self, *, invalidate: bool = False) -> Generator[None]:
        """Inside, all engines of the pool stand still between two steps; requests and caches stay, new requests wait.

        `update_weights` may be called inside. Nobody can change weights here by hand, so cached pages stay good; `invalidate` is
        there for code that was written for one process, and refused. A holder that dies lets go after the lease timeout. Raises
        NoReplicaError when the pool cannot be reached.
        """
        if invalidate:
            raise InvalidRequestError(
                "a pause of a pool changes no weights, so there is nothing to invalidate; use update_weights", param="invalidate"
            )
        paused = self._view.paused()
        self._courier.run(paused.__aenter__())
        try:
            yield
        finally:
            self._courier.run(paused.__aexit__(None, None, None))

    # ---- what there is to see -----------------------------------------------------------------------------------------------

    def pool(self) -> dict[str, Any]:
        """The Board's counts: replicas, who waits, work owed. Raises NoReplicaError while there is no Board."""
        counts = self._courier.run(self._view.snapshot())
        if counts is None:
            raise NoReplicaError(f"the Board of {self.app!r} cannot be reached now")
        return counts
