"""What keeps the server up and its tenants apart: keys, limits, bounds on memory, and nothing internal in what clients read."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from cb_ray.errors import ConfigError, QueueFullError, TenantLimitError
from cb_ray.serving.connection import EventStream
from cb_ray.serving.settings import DoorSettings
from cb_ray.serving.tenants import EVERYBODY, Keyring, Tenant, TenantGate
from tests.serving.doors import Exchange, chat_body, error_of, gauge, listening, make_door

CHAT = "/v1/chat/completions"
TENANTS = """
tenants:
  - name: search
    api_keys: [key-s, "sha256:{digest}"]
    requests_per_minute: 60
  - name: batch
    api_keys: [key-b]
    own_cache: false
    max_concurrent: 2
"""
DIGEST = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"  # of "foo"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.yaml"
    file.write_text(TENANTS.replace("{digest}", DIGEST))
    return file


# ---- keys and tenants


def test_keys_of_a_file_belong_to_tenants(keys: Path) -> None:
    """A key, or its SHA-256, names its tenant; a client cannot send the digest in place of the key."""
    ring = Keyring((), str(keys))
    assert [ring.find(key) and ring.find(key).name for key in ("key-s", "foo", "key-b")] == ["search", "search", "batch"]
    assert ring.find("") is ring.find("wrong") is ring.find(f"sha256:{DIGEST}") is None
    assert not ring.is_open and Keyring().is_open


def test_a_file_of_lines(tmp_path: Path) -> None:
    """One key a line, comments and empty lines aside; listed keys and the file's count alike."""
    file = tmp_path / "keys"
    file.write_text("# people\nsk-a\n\nsk-b\n")
    ring = Keyring(("sk-c",), str(file))
    assert all(ring.find(key) is EVERYBODY for key in ("sk-a", "sk-b", "sk-c")) and ring.find("# people") is None


def test_a_changed_file_is_read_again(keys: Path) -> None:
    """Keys are given and taken away without a restart; a file that is broken meanwhile changes nothing."""
    now = [0.0]
    ring = Keyring((), str(keys), lambda: now[0])

    def change(text: str) -> None:
        keys.write_text(text)
        os.utime(keys, ns=(1, int(now[0] * 1e9) + 7))
        now[0] += 2.0

    change("sk-new\n")
    assert ring.find("sk-new") is EVERYBODY and ring.find("key-s") is None
    change("tenants: [{")
    assert ring.find("sk-new") is EVERYBODY
    keys.unlink()
    now[0] += 2.0
    assert ring.find("sk-new") is EVERYBODY


@pytest.mark.parametrize(
    "text",
    [
        "tenants: [{",
        "tenants: [{name: a}]",
        "tenants: [{name: 'a b', api_keys: [SECRET]}]",
        "tenants: [{name: a, api_keys: [SECRET], rate: 3}]",
        "tenants: [{name: a, api_keys: [SECRET], max_concurrent: 0}]",
        "tenants: [{name: a, api_keys: [SECRET]}, {name: a, api_keys: [SECRET]}]",
    ],
)
def test_a_bad_file_is_an_error_without_keys_in_it(text: str, tmp_path: Path) -> None:
    """It says what is wrong where, and never quotes a key."""
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Keyring((), str(file))
    assert "SECRET" not in str(caught.value)


def test_a_missing_file_is_an_error() -> None:
    """A server that should ask for keys must not start without them."""
    with pytest.raises(ConfigError, match="cannot be read"):
        make_door(DoorSettings(api_keys_file="/nowhere/keys"))


def test_tenants_have_caches_of_their_own(keys: Path) -> None:
    """No salt that a client can choose is another tenant's; a tenant that shares does so with all who share."""
    door = make_door(DoorSettings(api_keys_file=str(keys)))
    for key in ("key-s", "key-b"):
        for salt in (None, "x", "tenant:search:"):
            assert door.post(CHAT, chat_body(cache_salt=salt), {"authorization": f"Bearer {key}"}).status_code == 200
    salts = [request.cache_salt for request in door.source.requests]
    assert salts == ["tenant:search:", "tenant:search:x", "tenant:search:tenant:search:", "", "shared:x", "shared:tenant:search:"]


def test_a_tenant_over_its_rate_comes_back_later(keys: Path) -> None:
    """429 with the time until its bucket holds a request again; other tenants and plain reading are not touched."""
    door = make_door(DoorSettings(api_keys_file=str(keys)))
    mine, other = {"authorization": "Bearer key-s"}, {"x-api-key": "key-b"}
    answers = [door.post(CHAT, chat_body(), mine) for _ in range(11)]
    assert [answer.status_code for answer in answers[:10]] == [200] * 10  # ten seconds' worth at once
    assert answers[10].status_code == 429 and int(answers[10].headers["retry-after"]) == 1
    assert error_of(answers[10])["code"] == "rate_limit_exceeded"
    assert door.get("/v1/models", mine).status_code == door.post(CHAT, chat_body(), other).status_code == 200
    assert gauge(door, "cb_ray_rejections_total") == 1


def test_rates_and_bounds_over_time() -> None:
    """The bucket fills at the tenant's rate; a place is free again when a request ends; Routers share the limits."""
    now = [0.0]
    gate = TenantGate(2, lambda: now[0])
    slow = Tenant(name="slow", requests_per_minute=120)
    for _ in range(10):
        gate.leave(slow, gate.enter(slow))
    with pytest.raises(TenantLimitError) as caught:
        gate.enter(slow)
    assert caught.value.retry_after_s == pytest.approx(1.0)
    now[0] += 1.0
    gate.leave(slow, gate.enter(slow))
    few = Tenant(name="few", max_concurrent=4)
    entered = [gate.enter(few) for _ in range(2)]
    with pytest.raises(TenantLimitError):
        gate.enter(few)
    now[0] += 6.0
    gate.leave(few, entered.pop())
    assert gate.enter(few) and gate.running() == {"few": 2}
    with pytest.raises(TenantLimitError) as caught:
        gate.enter(few)
    assert caught.value.retry_after_s == pytest.approx(3.0)  # requests take six seconds, and two places turn over


def test_a_client_that_leaves_frees_its_tenants_place(keys: Path) -> None:
    """Concurrency is counted until the answer ends, however it ends."""
    door = make_door(DoorSettings(api_keys_file=str(keys)), holds_after=2)

    async def scenario() -> None:
        exchanges = [Exchange(door.app, CHAT, chat_body(stream=True), {"x-api-key": "key-b"}) for _ in range(2)]
        for exchange in exchanges:
            await exchange.read('"content":"')
        refused = Exchange(door.app, CHAT, chat_body(), {"x-api-key": "key-b"})
        assert (await refused.sent.get())["status"] == 429
        for exchange in exchanges:
            exchange.leave()
            await exchange.task

    asyncio.run(scenario())
    assert door.app.state.door.gate.running() == {}


# ---- limits of a request


@pytest.mark.parametrize(
    ("settings", "fields", "param"),
    [
        ({"max_choices": 2}, {"n": 3}, "n"),
        ({"max_logprobs": 3}, {"logprobs": True, "top_logprobs": 4}, "logprobs"),
        ({"max_output_tokens": 5}, {"max_tokens": 6}, "max_tokens"),
    ],
)
def test_operators_limits_hold(settings: dict[str, Any], fields: dict[str, Any], param: str) -> None:
    """Above the operator's limits a request is refused by name; at them it is served."""
    door = make_door(DoorSettings(**settings))
    assert error_of(door.chat(**fields))["param"] == param
    assert door.chat().status_code == 200


def test_a_limit_on_answers_is_also_their_default() -> None:
    """Who names no limit gets the operator's, not the whole context."""
    door = make_door(DoorSettings(max_output_tokens=5))
    assert door.chat().json()["usage"]["completion_tokens"] == 5


def test_unknown_parameters_can_be_a_warning() -> None:
    """With the setting, what is unknown or not supported is left out and named in a header; what is wrong stays a 400."""
    door = make_door(DoorSettings(ignores_unknown=True))
    body = chat_body(frobnicate=1, web_search_options={}, temperature=0)
    body["messages"][0]["surprise"] = True
    response = door.post(CHAT, body)
    assert response.status_code == 200
    assert set(response.headers["x-cb-ray-warning"].removeprefix("ignored: ").split(", ")) == {
        "frobnicate",
        "web_search_options",
        "messages[0].surprise",
    }
    assert "x-cb-ray-warning" not in door.chat().headers
    assert error_of(door.chat(frobnicate=1, temperature=-1))["param"] == "temperature"


def test_a_body_that_never_comes_is_given_up() -> None:
    """A client that sends half a body and waits holds nothing for ever."""
    with listening(make_door(DoorSettings(body_timeout_s=0.2)).app) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            assert client.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_is_announced_too_long_is_not_read() -> None:
    """The length in its head is enough to refuse it."""
    door = make_door(DoorSettings(max_body_bytes=10))
    assert door.chat().status_code == 413


# ---- slow readers


class Connection:
    """A connection that takes `room` messages at once and the others only when told to."""

    def __init__(self, room: int) -> None:
        self.room, self.taken = asyncio.Semaphore(room), list[bytes]()
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.room.acquire()
        self.taken.append(message.get("body", b""))


async def produced(count: int, seen: list[int]) -> Any:
    try:
        for number in range(count):
            seen.append(number)
            await asyncio.sleep(0)
            yield b"%05d," % number
    finally:
        seen.append(-1)


def test_a_slow_reader_gets_everything_in_the_end() -> None:
    """While the connection is stuck events are read ahead; when it moves again all of them come, in order, and joined."""

    async def scenario() -> None:
        connection, seen = Connection(4), list[int]()
        stream = EventStream(produced(200, seen), max_unread_bytes=10_000)
        task = asyncio.create_task(stream({"type": "http"}, connection.receive, connection.send))
        while len(seen) < 201:
            await asyncio.sleep(0)
        assert len(connection.taken) == 4 and not task.done()
        for _ in range(1000):
            connection.room.release()
        await task
        assert b"".join(connection.taken) == b"".join(b"%05d," % number for number in range(200))
        assert len(connection.taken) < 12  # what was read ahead went out in one piece

    asyncio.run(scenario())


def test_a_reader_who_does_not_read_costs_bounded_memory() -> None:
    """Past the bound the stream is ended and its generator closed: the engine's request with it."""

    async def scenario() -> None:
        connection, seen, slow = Connection(4), list[int](), list[bool]()
        stream = EventStream(produced(10**6, seen), max_unread_bytes=600, slow=lambda: slow.append(True))
        await stream({"type": "http"}, connection.receive, connection.send)
        assert slow == [True] and seen[-1] == -1 and len(seen) < 120

    asyncio.run(scenario())


def test_a_reader_who_takes_nothing_for_too_long_is_left() -> None:
    """Also when little is made: a send that is stuck ends after its time."""

    async def scenario() -> None:
        connection, seen, slow = Connection(4), list[int](), list[bool]()
        stream = EventStream(produced(10, seen), send_timeout_s=0.05, slow=lambda: slow.append(True))
        await stream({"type": "http"}, connection.receive, connection.send)
        assert slow == [True] and seen[-1] == -1

    asyncio.run(scenario())


def test_a_client_that_leaves_while_it_is_slow() -> None:
    """Nothing is left behind: no reader, no generator."""

    async def scenario() -> None:
        connection, seen = Connection(4), list[int]()
        stream = EventStream(produced(10**6, seen), max_unread_bytes=10**9)
        task = asyncio.create_task(stream({"type": "http"}, connection.receive, connection.send))
        while len(seen) < 50:
            await asyncio.sleep(0)
        connection.gone.set()
        await task
        assert seen[-1] == -1 and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_a_real_connection_that_is_not_read() -> None:
    """Over TCP: a client that asks for an endless stream and never reads is cut, and its request is over."""
    door = make_door(DoorSettings(max_unread_bytes=100_000, send_timeout_s=30.0), says="word ")
    with listening(door.app, send_buffer=8192) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            body = json.dumps({"token_ids": [5], "stream": True, "sampling": {"ignore_eos": True}}).encode()
            client.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            with httpx.Client(base_url=url) as other:
                while "slow_reader" not in other.get("/metrics").text:
                    pass
    assert len(door.source.closed) > 0 and gauge(door, "cb_ray_requests_running") == 0


# ---- waiting


def test_a_stream_that_waits_is_kept_alive() -> None:
    """Past the interval a waiting stream gets headers and comments, which clients skip; then its tokens."""
    door = make_door(DoorSettings(keep_alive_s=0.05), holds_after=0)

    async def scenario() -> bytes:
        exchange = Exchange(door.app, CHAT, chat_body(stream=True))
        assert (await exchange.sent.get())["status"] == 200
        for _ in range(2):
            assert (await exchange.sent.get())["body"] == b": waiting\n\n"
        door.source.released.set()
        await exchange.task
        return b"".join(message["body"] for message in list(exchange.sent._queue))  # type: ignore[attr-defined]

    content = asyncio.run(scenario())
    assert b"data: [DONE]" in content and b'"role":"assistant"' in content
    assert gauge(door, "cb_ray_requests_running") == gauge(door, "cb_ray_requests_waiting") == 0


def test_a_refusal_after_the_headers_is_an_event() -> None:
    """Too late for a status, the error is the stream's last event, in its envelope."""
    door = make_door(DoorSettings(keep_alive_s=0.05), holds_after=0)

    async def scenario() -> bytes:
        exchange = Exchange(door.app, CHAT, chat_body(stream=True))
        await exchange.read(": waiting")
        door.source.fails = QueueFullError(1, 1)
        door.source.released.set()
        await exchange.task
        return b"".join(message.get("body", b"") for message in list(exchange.sent._queue))  # type: ignore[attr-defined]

    assert b'"code":"queue_full"' in asyncio.run(scenario())


def test_leaving_while_kept_alive_cancels() -> None:
    """The same as before: the request is gone at once."""
    door = make_door(DoorSettings(keep_alive_s=0.05), holds_after=0)

    async def scenario() -> None:
        exchange = Exchange(door.app, CHAT, chat_body(stream=True))
        await exchange.read(": waiting")
        exchange.leave()
        await exchange.task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())
    assert len(door.source.closed) == 1 and gauge(door, "cb_ray_requests_waiting") == 0


# ---- what is told


def test_nothing_internal_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """An error that nobody foresaw is a 500 with the request's id, by which the log can be searched; its text is in the log alone."""
    door = make_door(fails=RuntimeError("/secret/path broke"))
    response = door.post(CHAT, chat_body(), {"x-request-id": "find-me"})
    assert response.status_code == 500 and "secret" not in response.text and "find-me" in error_of(response)["message"]
    assert "find-me" in caplog.text and "/secret/path broke" in caplog.text


def test_the_access_log_tells_all_but_secrets(caplog: pytest.LogCaptureFixture, keys: Path) -> None:
    """One JSON object a request: ids, tenant, status, times and tokens; no key, no header, no text."""
    door = make_door(DoorSettings(access_log=True, api_keys_file=str(keys)))
    with caplog.at_level(logging.INFO, "cb_ray.access"):
        secret = {"authorization": "Bearer key-s", "x-request-id": "r1"}
        door.post(CHAT + "?token=hunter2", chat_body("whisper", stream=True), secret)
        door.post(CHAT, chat_body(temperature=-1), {**secret, "x-request-id": "r2"})
        door.post(CHAT, chat_body(), {"authorization": "Bearer wrong-key", "x-request-id": "r3"})
    lines = [json.loads(record.message) for record in caplog.records if record.name == "cb_ray.access"]
    assert [(line["request_id"], line["status"], line["tenant"]) for line in lines] == [
        ("r1", 200, "search"),
        ("r2", 400, "search"),
        ("r3", 401, None),
    ]
    assert (
        lines[0]["completion_tokens"] > 0
        and lines[0]["ms"] >= lines[0]["first_byte_ms"]
        and lines[0]["id"].startswith("chatcmpl-")
    )
    assert "temperature" in lines[1]["error"]
    for word in ("key-s", "wrong-key", "hunter2", "whisper", "Bearer"):
        assert word not in caplog.text


def test_settings_hide_their_keys() -> None:
    """Whoever prints the settings prints no key."""
    assert "hunter2" not in repr(DoorSettings(api_keys=("hunter2",)))


def test_how_an_answer_was_made() -> None:
    """With the header, or always with the setting: queue time, cached tokens, preemptions and weights, whole and streamed."""
    for door, headers in ((make_door(), {"x-cb-ray-debug": "1"}), (make_door(DoorSettings(extension_fields=True)), {})):
        whole = door.post(CHAT, chat_body(), headers).json()["cb_ray"]
        last = door.post(CHAT, chat_body(stream=True), headers).text.strip().split("\n\n")[-2]
        streamed = json.loads(last.removeprefix("data: "))["cb_ray"]
        for made in (whole, streamed):
            (choice,) = made["choices"]
            assert (choice["cached_tokens"], choice["preemptions"], choice["queue_ms"]) == (7, 0, 0.0)
            assert made["request_id"] and choice["request_id"].startswith("chatcmpl-")
    assert "cb_ray" not in make_door().chat().json()
