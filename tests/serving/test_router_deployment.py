"""The Router without a cluster: what handle calls may pass, and what errors look like that crossed Ray."""

from __future__ import annotations

import asyncio
import gc
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError

from cb_ray.errors import CbRayError, EngineFailedError, InvalidRequestError, NoReplicaError, QueueFullError, ReplicaLostError
from cb_ray.messages import GenerateRequest, SamplingParams, TokenChunk
from cb_ray.serving.args import AppArgs, parse_args
from cb_ray.serving.handle_source import HandleSource, own_error
from cb_ray.serving.router_deployment import Router, door_settings
from tests.serving.doors import DoorUnderTest, FakeSource, chat_body, error_of
from tests.tiny import MAX_LENGTH


class FakeHandle:
    """What a Router uses of a handle: `options(stream=True).generate.remote(request=…)`, iteration and `cancel()`."""

    def __init__(self, source: FakeSource) -> None:
        self.source, self.calls, self.cancelled = source, [], 0
        self.generate = self
        self.app_name, self.deployment_name = "cb-ray", "Engine"

    def options(self, *, stream: bool) -> FakeHandle:
        assert stream
        return self

    def remote(self, *, request: GenerateRequest) -> FakeCall:
        self.calls.append(request)
        return FakeCall(self, self.source.generate(request))


class FakeCall:
    """A DeploymentResponseGenerator, so far as a Router knows it."""

    def __init__(self, handle: FakeHandle, chunks: AsyncIterator[TokenChunk]) -> None:
        self._handle, self._chunks = handle, chunks

    def __aiter__(self) -> FakeCall:
        return self

    async def __anext__(self) -> TokenChunk:
        return await anext(self._chunks)

    def cancel(self) -> None:
        self._handle.cancelled += 1


@pytest.fixture
def make_router(tiny_model_dir: Path):
    """A Router of the tiny model over a FakeHandle whose source follows a script. The pipe has tests of its own."""

    def make(values: dict[str, Any] | None = None, **script: Any) -> tuple[Router, FakeHandle]:
        values = dict(values or {})
        router_values = {"token_pipe": False, **values.pop("router", {})}
        args = parse_args({"model": str(tiny_model_dir), "served_model_name": "tiny", "router": router_values, **values})
        handle = FakeHandle(None)  # type: ignore[arg-type]
        router = Router(args, handle)  # type: ignore[arg-type]
        handle.source = FakeSource(codec=router.model.codec, **script)
        return router, handle

    return make


def read(router: Router, request: Any) -> list[TokenChunk]:
    async def scenario() -> list[TokenChunk]:
        return [chunk async for chunk in router.generate(request)]

    return asyncio.run(scenario())


def test_a_router_knows_its_model_from_files(make_router) -> None:
    """Name, context length, vocabulary and end-of-sequence come from the model's own files; a setting may shorten the context."""
    router, _ = make_router()
    model = router.model
    assert (model.name, model.context_length, model.vocab_size, model.eos_token_ids) == ("tiny", MAX_LENGTH, 320, (3,))
    shorter, _ = make_router({"engine": {"max_model_len": 64}})
    assert shorter.model.context_length == 64
    assert router.model.fingerprint == make_router()[0].model.fingerprint


def test_http_goes_through_the_handle(make_router) -> None:
    """Serve gets the app that answers with the engine's tokens."""
    router, handle = make_router()
    door = DoorUnderTest(app=router.__serve_build_asgi_app__(), source=handle.source, model=router.model)
    assert door.chat().json()["choices"][0]["message"]["content"] == handle.source.says
    assert len(handle.calls) == 1 and handle.cancelled == 0


def test_no_stream_waits_for_the_collector(make_router) -> None:
    """A Router holds some 400,000 objects from its imports on; to look through them took 0.3 s, in which no stream goes on."""
    router, _ = make_router()
    gc.unfreeze()
    router.__serve_build_asgi_app__()
    try:
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("request_", "want"),
    [
        ([5, 6], {"token_ids": (5, 6), "max_new_tokens": None}),
        (
            {"token_ids": [5, 6], "max_new_tokens": 3, "request_id": "r"},
            {"token_ids": (5, 6), "max_new_tokens": 3, "request_id": "r"},
        ),
        ({"token_ids": (5,), "sampling": {"temperature": 0.0, "stop_token_ids": [9]}}, {"token_ids": (5,)}),
    ],
)
def test_what_a_handle_call_may_pass(make_router, request_: Any, want: dict[str, Any]) -> None:
    """Token ids alone, or a request's fields as a dictionary: the rest is as the model's author set it."""
    router, handle = make_router()
    chunks = read(router, request_)
    made = handle.calls[0]
    assert {name: getattr(made, name) for name in want} == want
    assert made.sampling.eos_token_ids == (3,) and made.request_id
    assert chunks[-1].is_terminal


def test_a_request_passes_through_untouched(make_router) -> None:
    """A GenerateRequest is the caller's own business, down to its end-of-sequence."""
    router, handle = make_router()
    request = GenerateRequest(request_id="r", token_ids=(1, 2), max_new_tokens=2, sampling=SamplingParams(seed=1))
    read(router, request)
    assert handle.calls == [request]


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ([], "input_ids"),
        ([10**6], "input_ids"),
        ("text", "input_ids"),
        ({"max_new_tokens": 1}, "token_ids"),
        ({"token_ids": [1], "max_tokens": 1}, "max_tokens"),
        ({"token_ids": [1], "sampling": {"temprature": 1}}, "temprature"),
        ({"token_ids": [1], "sampling": {"temperature": -1}}, "temperature"),
    ],
)
def test_bad_handle_calls_are_refused_by_name(make_router, request_: Any, param: str) -> None:
    """A caller from Python gets the same clear errors as one over HTTP."""
    router, handle = make_router()
    with pytest.raises(InvalidRequestError) as caught:
        read(router, request_)
    assert caught.value.param == param and handle.calls == []


def test_a_caller_that_stops_reading_cancels(make_router) -> None:
    """Closing the generator of a handle call cancels the call to the engine; reading it to its end does not."""
    router, handle = make_router()

    async def scenario() -> None:
        stream = router.generate([5])
        await anext(stream)
        await stream.aclose()

    asyncio.run(scenario())
    assert handle.cancelled == 1
    read(router, [5])
    assert handle.cancelled == 1


def test_settings_of_an_app_reach_the_door() -> None:
    """Every setting under `router:` that is the door's arrives there."""
    values = {"router": {"api_keys": ["k"], "cors_origins": ["*"], "request_timeout_s": 5, "num_tokenizer_threads": 2}}
    settings = door_settings(parse_args(values))
    assert (settings.api_keys, settings.cors_origins) == (("k",), ("*",))
    assert (settings.request_timeout_s, settings.num_tokenizer_threads, settings.adds_request_id) == (5.0, 2, False)
    assert door_settings(AppArgs()).api_keys == ()


# ---- errors that crossed Ray


def crossed(error: Exception) -> Exception:
    """`error` as a caller sees it when a replica raised it: wrapped and pickled by Ray, then of both classes at once."""
    wrapped = RayTaskError("generate", "Traceback: /secret/path", error)
    return pickle.loads(pickle.dumps(wrapped)).as_instanceof_cause()


OURS = [
    InvalidRequestError("too long", param="prompt", code="context_length_exceeded"),
    QueueFullError(3, 4, 2.5),
    EngineFailedError("a step failed"),
    NoReplicaError("none", 3.0),
    ReplicaLostError("r", 5),
]


@pytest.mark.parametrize("error", OURS)
def test_our_errors_come_back_as_they_were(error: CbRayError) -> None:
    """Fields survive the way through Ray, and the text is ours again, not Ray's traceback."""
    back = own_error(crossed(error))
    assert type(back) is type(error) and back.args == error.args and str(back) == str(error)


@pytest.mark.parametrize(
    ("error", "kind", "retry"),
    [
        (BackPressureError(5, 4, 429, 2.5), QueueFullError, 2.5),
        (BackPressureError(5, 4, 503, 3.0), NoReplicaError, 3.0),
        (BackPressureError(5, 4), NoReplicaError, 1.0),
        (ActorDiedError(), ReplicaLostError, None),
        (RequestCancelledError("r"), ReplicaLostError, None),
        (RuntimeError("boom /secret/path"), CbRayError, None),
        (ValueError("boom /secret/path"), CbRayError, None),
    ],
)
def test_rays_errors_become_ours(error: Exception, kind: type[CbRayError], retry: float | None) -> None:
    """Full queues are 429 with their time, dead replicas 503, and what nobody foresaw is 500 without its text."""
    for found in (own_error(error), own_error(crossed(error))):
        assert type(found) is kind and getattr(found, "retry_after_s", None) == retry
        assert "secret" not in str(found)


def test_a_deployment_that_failed_is_a_503() -> None:
    """Serve's error for a deployment that cannot come up has no useful text for clients."""
    from ray.serve._private.common import DeploymentID

    assert type(own_error(DeploymentUnavailableError(DeploymentID("Engine", "cb-ray")))) is NoReplicaError


def test_an_engines_error_reaches_http_with_its_status(make_router) -> None:
    """The whole way: a replica refuses, Ray wraps, the client sees 429 and when to come back."""
    router, handle = make_router(fails=crossed(QueueFullError(3, 4, 2.5)))
    door = DoorUnderTest(app=router.http, source=handle.source, model=router.model)
    response = door.post("/v1/chat/completions", chat_body(stream=True))
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert error_of(response)["code"] == "queue_full"


def test_a_lost_replica_tells_how_far_it_came() -> None:
    """Failover needs to know how many tokens had come."""

    class Broken:
        def options(self, **_: Any) -> Broken:
            return self

        @property
        def generate(self) -> Broken:
            return self

        def remote(self, *, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
            return self._chunks(request)

        async def _chunks(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
            yield TokenChunk(request_id=request.request_id, token_ids=(1, 2))
            raise ActorDiedError

    async def scenario() -> None:
        source = HandleSource(Broken())  # type: ignore[arg-type]
        async for _ in source.generate(GenerateRequest(request_id="r", token_ids=(1,))):
            pass

    with pytest.raises(ReplicaLostError) as caught:
        asyncio.run(scenario())
    assert caught.value.tokens_so_far == 2
