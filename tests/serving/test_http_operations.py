"""What operators and tools use: models, tokens, health, readiness, metrics, ids, and a description that is true."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import httpx
import jsonschema
import pytest

from cb_ray.errors import EngineFailedError
from cb_ray.serving import http
from cb_ray.serving.settings import DoorSettings
from tests.serving.doors import CONTEXT, chat_body, error_of, gauge, make_door, make_model


def test_models() -> None:
    """The list and the card of one model agree, also for a name with a slash; another name is a 404."""
    door = make_door(model=make_model(name="org/tiny"))
    listed = door.get("/v1/models").json()
    assert listed["object"] == "list" and len(listed["data"]) == 1
    card = listed["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("org/tiny", "model", CONTEXT)
    assert door.get("/v1/models/org/tiny").json() == door.get("/v1/models/org%2Ftiny").json() == card
    assert error_of(door.get("/v1/models/other"))["code"] == "model_not_found"


@pytest.mark.parametrize("text", ["Wie geht's? 🎉", "", "<|im_end|>"])
def test_tokens_of_a_text_and_back(text: str) -> None:
    """/tokenize says what a completion's prompt is counted as, and /detokenize undoes it."""
    door = make_door()
    found = door.post("/tokenize", {"model": "tiny", "prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == door.model.codec.encode(text) and found["count"] == len(found["token_strs"])
    assert door.post("/detokenize", {"model": "tiny", "tokens": found["tokens"]}).json() == {"prompt": text}


def test_tokens_of_a_conversation() -> None:
    """/tokenize of messages is what a chat's prompt is counted as."""
    door = make_door()
    ids = door.post("/tokenize", {"messages": chat_body("Hi 🎉")["messages"]}).json()["tokens"]
    door.chat("Hi 🎉")
    assert tuple(ids) == door.source.requests[0].token_ids


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
def test_bad_tokens(path: str, body: dict[str, Any], status: int, param: str) -> None:
    """The two routes refuse like the others."""
    response = make_door().post(path, body)
    assert (response.status_code, error_of(response)["param"]) == (status, param)


def test_health_needs_no_engine() -> None:
    """/health says that this process answers, whatever the engines do."""
    door = make_door(fails=EngineFailedError("broken"))
    assert door.get("/health").json() == {"status": "ok"}
    assert door.source.requests == []


def test_ready_means_that_a_token_was_made() -> None:
    """/ready asks for one token the first time, once for all who ask, and never again after it came."""
    door = make_door(holds_after=0)

    async def scenario() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(door.app), base_url="http://door") as client:
            asked = [asyncio.create_task(client.get("/ready")) for _ in range(3)]
            await door.source.asked.wait()
            door.source.released.set()
            answers = [*await asyncio.gather(*asked), await client.get("/ready")]
        return [answer.status_code for answer in answers]

    assert asyncio.run(scenario()) == [200] * 4
    assert [request.max_new_tokens for request in door.source.requests] == [1]


def test_not_ready_while_engines_fail() -> None:
    """A failed try is a 503 that says why, and the next one tries again."""
    door = make_door(fails=EngineFailedError("no memory"))

    async def scenario() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(door.app), base_url="http://door") as client:
            first = await client.get("/ready")
            door.source.fails = None
            return [first.status_code, (await client.get("/ready")).status_code]

    assert asyncio.run(scenario()) == [503, 200]


def test_metrics_move() -> None:
    """Tokens, responses and times of requests are counted, and vLLM's names say the same as ours."""
    door = make_door()
    usage = door.chat().json()["usage"]
    door.chat(stream=True)
    assert gauge(door, "cb_ray_prompt_tokens_total") == gauge(door, "vllm:prompt_tokens_total") == 2 * usage["prompt_tokens"]
    assert gauge(door, "vllm:generation_tokens_total") == 2 * usage["completion_tokens"]
    assert gauge(door, "cb_ray_time_to_first_token_seconds_count") == 1
    assert gauge(door, "cb_ray_request_duration_seconds_count") == 2
    assert 'cb_ray_http_responses_total{route="/v1/chat/completions",status="200"} 2.0' in door.get("/metrics").text


def test_every_metric_has_a_type() -> None:
    """/metrics is Prometheus text."""
    response = make_door().get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    types = set(re.findall(r"^# TYPE (\S+) \w+$", response.text, re.M))
    for name in re.findall(r"^([A-Za-z_:]\w*[\w:]*)(?:\{.*\})? \S+$", response.text, re.M):
        assert name in types or re.sub(r"_(bucket|sum|count|total|created)$", "", name) in types


def test_request_ids_come_back() -> None:
    """A client's X-Request-Id comes back on answers, streams and errors; without a usable one there is a fresh one."""
    door = make_door()
    sent = {"x-request-id": "mine-1"}
    for response in (
        door.post("/v1/chat/completions", chat_body(), sent),
        door.post("/v1/chat/completions", chat_body(stream=True), sent),
        door.post("/v1/chat/completions", chat_body(temperature=-1), sent),
        door.get("/nowhere", sent),
    ):
        assert response.headers["x-request-id"] == "mine-1"
    made = {door.get("/health", headers).headers["x-request-id"] for headers in ({}, {}, {"x-request-id": "a b\x7f"})}
    assert len(made) == 3


def test_request_ids_are_left_to_a_proxy_that_adds_them() -> None:
    """Ray Serve's proxy adds the header itself; a second one would read as 'id, id' to clients."""
    assert "x-request-id" not in make_door(DoorSettings(adds_request_id=False)).get("/health").headers


def test_cors() -> None:
    """Browsers of the named origins may call, and see the headers that matter; others may not."""
    door = make_door(DoorSettings(cors_origins=("https://app.example",), api_keys=("k",)))
    ask = {"origin": "https://app.example", "access-control-request-method": "POST"}
    preflight = door.request("OPTIONS", "/v1/chat/completions", b"", ask)
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == "https://app.example"
    other = door.request("OPTIONS", "/v1/chat/completions", b"", {**ask, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_long_text_is_tokenized_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt must not hold up the tokens of others; a short one is not worth a thread."""
    seen: list[bool] = []
    real = http.tokenize_chat

    def watch(*args: Any) -> list[int]:
        seen.append(threading.current_thread() is threading.main_thread())
        return real(*args)

    monkeypatch.setattr(http, "tokenize_chat", watch)
    door = make_door(model=make_model(context_length=None))
    door.chat("short")
    door.chat("long " * 1000)
    assert seen == [True, False]


def test_a_time_limit_goes_to_the_engine() -> None:
    """The operator's time limit travels with each request."""
    door = make_door(DoorSettings(request_timeout_s=12.5))
    door.chat()
    door.complete(stream=True)
    assert [request.timeout_s for request in door.source.requests] == [12.5, 12.5]


def test_the_description_is_whole() -> None:
    """/openapi.json names every route and body, and each reference in it leads somewhere."""
    door = make_door()
    schema = door.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/ready"} <= schema["paths"].keys()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatBody"}
    for reference in re.findall(r'"\$ref":\s*"#/components/schemas/([^"]+)"', door.get("/openapi.json").text):
        assert reference in schema["components"]["schemas"]
    assert "temperature" in schema["components"]["schemas"]["ChatBody"]["properties"]
    assert door.get("/docs").status_code == 200


ASKED: list[tuple[str, str, Any]] = [
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/tiny", None),
    ("GET", "/v1/capabilities", None),
    ("POST", "/v1/chat/completions", chat_body(logprobs=True, top_logprobs=2, n=2)),
    ("POST", "/v1/completions", {"model": "tiny", "prompt": "a", "logprobs": 1, "echo": True}),
    ("POST", "/v1/responses", {"model": "tiny", "input": "a"}),
    ("POST", "/v1/responses/input_tokens", {"model": "tiny", "input": "a"}),
    ("POST", "/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}),
    ("POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}),
    ("POST", "/generate", {"token_ids": [5], "sampling": {"logprobs": 2, "prompt_logprobs": 0}}),
    ("POST", "/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [5]}),
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("POST", "/v1/messages", {}),
    ("POST", "/v1/responses", {}),
    ("POST", "/v1/embeddings", {"model": "tiny", "input": ["a", "b"]}),
    ("POST", "/v1/embeddings", {}),
    ("GET", "/v1/responses/x", None),
    ("GET", "/debug/pool", None),
]


@pytest.mark.parametrize(("method", "path", "body"), ASKED, ids=[f"{method} {path}" for method, path, _ in ASKED])
def test_answers_are_as_described(method: str, path: str, body: Any) -> None:
    """Every answer, and every error, fits the schema that the description gives for its route and status."""
    door = make_door(DoorSettings(extension_fields=True))
    response = door.post(path, body) if method == "POST" else door.get(path)
    schema = door.get("/openapi.json").json()
    template = path.replace("/tiny", "/{name}").replace("/x", "/{response_id}")
    described = schema["paths"][template][method.lower()]["responses"]
    status = str(response.status_code)
    known = described.get(status) or described[f"{status[0]}XX"]
    checked = {**known["content"]["application/json"]["schema"], "components": schema["components"]}
    jsonschema.Draft202012Validator(checked).validate(response.json())


def test_what_is_described_is_what_is_asked() -> None:
    """Each route's body in the description is the model that reads it: unknown fields are refused, required ones asked for."""
    door = make_door()
    schema = door.get("/openapi.json").json()
    for route in door.app.state.door.routes():
        operation = schema["paths"][route.path.replace(":path", "")][route.method.lower()]
        assert ("requestBody" in operation) == (route.body is not None) and operation["summary"]
        if route.body is not None:
            name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            found = schema["components"]["schemas"][name]
            assert found["additionalProperties"] is False
            required = {field for field, info in route.body.model_fields.items() if info.is_required()}
            assert set(found.get("required", ())) == required
            assert door.post(route.path, {"no such field": 1}).status_code == 400
