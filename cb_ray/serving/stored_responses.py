"""Responses that outlive their request: stored ones, and those that are made in the background.

Owns what a record is, who may read it (the tenant that made it), and the tasks that make background responses. Knows the
store's interface and the responses dialect; not where the store is.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic_core import to_json

from ..errors import CbRayError, InvalidRequestError, RequestCancelledError, UnknownResponseError
from .answering import Answerer, public_error
from .generation import Choice, cancel_and_wait
from .response_store import Responses
from .responses_dialect import ResponsesBody
from .responses_reply import ResponsesReply, Save
from .translation import Message

logger = logging.getLogger(__name__)

_OVER = {"completed", "incomplete", "failed", "cancelled"}


class StoredResponses:
    """The handlers of stored responses. `store` None: nothing is stored."""

    def __init__(self, store: Responses | None, answerer: Answerer) -> None:
        self._store, self._answerer = store, answerer
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def can_store(self) -> bool:
        return self._store is not None

    async def close(self) -> None:
        """Background responses end with their process; their records say so later."""
        await cancel_and_wait(list(self._tasks))

    # used by the door

    async def history(self, request: Request, previous_id: str | None) -> list[Message]:
        """The conversation up to the response that a new one goes on from. Raises InvalidRequestError when it is not there."""
        if previous_id is None:
            return []
        try:
            record = await self._record(request, previous_id)
        except UnknownResponseError as error:
            raise InvalidRequestError(str(error), param="previous_response_id", code="previous_response_not_found") from None
        if record["response"]["status"] not in ("completed", "incomplete"):
            status = record["response"]["status"]
            raise InvalidRequestError(
                f"the previous response is {status}; wait until it is completed", param="previous_response_id"
            )
        return record["history"]

    def saver(self, request: Request, body: ResponsesBody, history: Sequence[Message]) -> Save | None:
        """What keeps a response with its conversation; None where it is not to be kept."""
        if self._store is None or not body.stores:
            return None
        store, tenant = self._store, request.state.tenant.name
        given = _input(body)

        async def save(response: dict[str, Any], turns: Sequence[Message]) -> bool:
            from .responses_dialect import messages_of

            talk = [*history, *messages_of(body.input), *turns]
            record = to_json({"response": response, "input": given, "history": talk})
            try:
                await store.put(tenant, response["id"], record, response["status"] not in _OVER)
            except RuntimeError:
                logger.warning("response %s is not stored: the store cannot be reached", response["id"])
                return False
            return True

        return save

    async def begin(self, request: Request, reply: ResponsesReply, choices: Sequence[Choice]) -> Response:
        """Start a background response and answer with it as it stands."""
        if not await reply.save([]):
            raise CbRayError("the response cannot be stored now, so it was not begun; send it again")
        # a context of its own: what is called from a request is cancelled with it
        making = self._make(request.state.tenant.name, request.state.request_id, reply, choices)
        task = asyncio.get_running_loop().create_task(making, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return JSONResponse(reply.object())

    async def _make(self, tenant: str, request_id: str, reply: ResponsesReply, choices: Sequence[Choice]) -> None:
        work = asyncio.create_task(self._answerer.run(choices))
        watch = asyncio.create_task(self._cancelled(tenant, reply.head.id))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done() and not work.done():
                await cancel_and_wait((work,))
                reply.cancel()
            else:
                reply.conclude(work.result())
        except Exception as error:
            reply.fail(public_error(error, request_id))
        finally:
            await cancel_and_wait((work, watch))
        if await self._is_kept(tenant, reply.head.id):  # it may have been deleted meanwhile
            await reply.save([reply.turn()])

    async def _cancelled(self, tenant: str, name: str) -> None:
        """Returns when the response is to be made no further."""
        assert self._store is not None
        while True:
            try:
                if await self._store.watch(tenant, name):
                    return
            except RuntimeError as error:  # with the store the response is lost, and nobody could ever read it
                raise RequestCancelledError(name) from error

    async def _is_kept(self, tenant: str, name: str) -> bool:
        assert self._store is not None
        try:
            return await self._store.get(tenant, name) is not None
        except RuntimeError:
            return False

    # routes

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream") in ("true", "1"):
            raise InvalidRequestError("a stored response is given as a whole; leave stream out", param="stream")
        record = await self._record(request, request.path_params["response_id"])
        return JSONResponse(record["response"])

    async def delete(self, request: Request) -> Response:
        name = request.path_params["response_id"]
        if self._store is None or not await self._store.delete(request.state.tenant.name, name):
            raise UnknownResponseError(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        name = request.path_params["response_id"]
        response = (await self._record(request, name))["response"]
        if not response["background"]:
            raise InvalidRequestError("only a response with background: true can be cancelled", param="response_id")
        if response["status"] not in _OVER:
            assert self._store is not None
            await self._store.cancel(request.state.tenant.name, name)
            response = {**response, "status": "cancelled"}
        return JSONResponse(response)

    async def input_items(self, request: Request) -> Response:
        items = (await self._record(request, request.path_params["response_id"]))["input"]
        if request.query_params.get("order", "desc") == "desc":
            items = items[::-1]
        ends = {"first_id": items[0]["id"] if items else None, "last_id": items[-1]["id"] if items else None}
        return JSONResponse({"object": "list", "data": items, **ends, "has_more": False})

    async def _record(self, request: Request, name: str) -> dict[str, Any]:
        """Raises UnknownResponseError."""
        found = await self._store.get(request.state.tenant.name, name) if self._store is not None else None
        if found is None:
            raise UnknownResponseError(name)
        record, lost = json.loads(found[0]), found[1]
        if lost and record["response"]["status"] not in _OVER:
            failure = {"code": "server_error", "message": "the process that made this response is gone; send it again"}
            record["response"].update(status="failed", error=failure)
        return record


def _input(body: ResponsesBody) -> list[dict[str, Any]]:
    """The input as items, each with an id."""
    if isinstance(body.input, str):
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    else:
        given = [item.model_dump(exclude_none=True) for item in body.input]
    return [{"id": f"item_{number}", **item} for number, item in enumerate(given)]
