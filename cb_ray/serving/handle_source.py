"""`HandleSource`: tokens from the engine deployment, with errors of this package whatever crossed Ray.

Owns the one place where Ray's and Serve's exceptions are unwrapped. They are told by name, so this file imports no Ray and
depends on no version of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ..errors import CbRayError, NoReplicaError, QueueFullError, ReplicaLostError
from ..messages import GenerateRequest, TokenChunk
from .token_pipe import Channel, PipeInlet

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

_DIED = {"RayActorError", "ObjectLostError", "NodeDiedError", "WorkerCrashedError", "LocalRayletDiedError"}
_TAKEN_AWAY = {"RequestCancelledError", "TaskCancelledError"}  # by Serve: a cancellation of ours never arrives here as an error


_LAST_WORD_S = 5.0  # how much later than its call's end a request's last tokens may come through the pipe


class HandleSource:
    """Tokens from the engine deployment. Closing an iterator early cancels the request in its engine.

    With an `inlet` they come through its pipe, and the call itself carries only what went wrong; or the tokens as well, from an
    engine that cannot reach the pipe.
    """

    def __init__(self, engine: DeploymentHandle, inlet: PipeInlet | None = None) -> None:
        self._engine = engine.options(stream=True)
        self._inlet = inlet
        self._followers: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest, attempt: int = 0) -> AsyncGenerator[TokenChunk]:
        """The chunks of one request. Raises CbRayError, whatever was raised on the other side.

        A request that was tried before (`attempt` above 0) was admitted then, and is not refused now.
        """
        extra: dict[str, Any] = {"attempt": attempt} if attempt else {}
        channel: Channel | None = None
        if self._inlet is not None:
            channel, extra["pipe"] = await self._inlet.open()
        call: Any = self._engine.generate.remote(request=request, **extra)
        follower = self._follow(call, channel) if channel is not None else None
        next_chunk: Callable[[], Awaitable[TokenChunk]] = aiter(call).__anext__ if channel is None else channel.next
        num_tokens, over = 0, False
        try:
            while channel is None or not over:  # a call is read to its end, beyond the last chunk
                chunk = await next_chunk()
                num_tokens += len(chunk.token_ids)
                over = chunk.is_terminal
                yield chunk
        except StopAsyncIteration:
            over = True
        except Exception as error:
            over = True
            raise own_error(error, num_tokens) from error
        finally:
            if channel is not None and self._inlet is not None:
                self._inlet.close(channel)
            if not over:
                call.cancel()  # closes the generator in the engine's replica, which cancels the request there
                if follower is not None:
                    follower.cancel()

    def _follow(self, call: AsyncIterator[TokenChunk], channel: Channel) -> asyncio.Task[None]:
        """A task that reads `call` to its end, which comes a little after the last chunk."""
        follower = asyncio.create_task(_follow(call, channel))
        self._followers.add(follower)
        follower.add_done_callback(self._followers.discard)
        return follower


async def _follow(call: AsyncIterator[TokenChunk], channel: Channel) -> None:
    """What comes through the call itself goes to the channel as well, and so does how it ends."""
    try:
        async for chunk in call:
            channel.put(chunk)
    except asyncio.CancelledError:
        channel.fail(ReplicaLostError(""))
        raise
    except Exception as error:
        channel.fail(error)
    else:  # all was sent; it is here or on its way, unless the connection broke under the last word
        asyncio.get_running_loop().call_later(_LAST_WORD_S, channel.fail, ReplicaLostError(""))


def own_error(error: BaseException, tokens_so_far: int = 0) -> CbRayError:
    """The error of this package that an exception from a handle call stands for.

    Ray raises what a replica raised as an object that is a RayTaskError and of the original class at once, with a traceback
    for its text and the original in `cause`. Serve adds errors of its own: full queues, deployments that cannot serve.
    """
    while "RayTaskError" in _kinds(error) and isinstance(getattr(error, "cause", None), BaseException):
        error = error.cause  # type: ignore[attr-defined]
    if isinstance(error, CbRayError):
        return error
    kinds = _kinds(error)
    if "BackPressureError" in kinds:
        return _back_pressure(error)
    if kinds & (_DIED | _TAKEN_AWAY):
        return ReplicaLostError("", tokens_so_far)
    if kinds & {"DeploymentUnavailableError", "RayServeException"}:
        return NoReplicaError("the engines cannot be reached now; Ray Serve's status page says why")
    logger.error("an engine raised %s", type(error).__name__, exc_info=error)
    return CbRayError("the engine failed on this request; its log says why")


def _kinds(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _back_pressure(error: BaseException) -> CbRayError:
    """Serve's refusal as ours: 429 means come back later, 503 that nothing can serve."""
    retry_after_s = getattr(error, "retry_after_s", None) or 1.0
    if getattr(error, "status_code", 503) != 429:
        return NoReplicaError("no replica can take a request now", retry_after_s)
    waiting, limit = (error.args + (0, 0))[:2]
    return QueueFullError(waiting, limit, retry_after_s)
