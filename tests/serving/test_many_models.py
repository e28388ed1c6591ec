"""Several models behind one door: a request goes to the model it names, and what concerns all of them is asked of all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError

from cb_ray.errors import ConfigError, NoReplicaError
from cb_ray.serving.args import parse_models
from cb_ray.serving.http import build_http_app
from cb_ray.serving.many_models import merged, several
from cb_ray.serving.settings import DoorSettings
from cb_ray.serving.tenants import TenantGate
from tests.serving.doors import FakeSource, make_model, no_board

SAYS = {"first": "I am the first", "second/one": "and I the second"}


class FakePool:
    """A pool's view that knows its name. There is no Board."""

    def __init__(self, name: str) -> None:
        self.name, self.lookout = name, no_board()

    async def snapshot(self) -> dict[str, Any]:
        return {
            "waiting": 0,
            "limit": 3,
            "owed_s": 0.5,
            "index_pages": 0,
            "counters": {},
            "reasons": {},
            "replicas": {self.name: REPLICA},
        }


REPLICA = {"leases": 1, "stalled": 0, "owed_s": 0.25, "cache_used": 0.0}


@contextlib.asynccontextmanager
async def door(
    keys: tuple[str, ...] = (), file: str | None = None, **fails: Exception
) -> AsyncGenerator[tuple[httpx.AsyncClient, dict[str, FakeSource]]]:
    models = {name: make_model(name=name) for name in SAYS}
    sources = {
        name: FakeSource(codec=model.codec, says=SAYS[name], fails=fails.get(name.partition("/")[0]))
        for name, model in models.items()
    }
    doors, gate = {}, TenantGate()
    for name, model in models.items():
        beside = tuple(other for other in models.values() if other is not model)
        kept: Any = FakePool(name)
        settings = DoorSettings(api_keys=keys, api_keys_file=file)
        doors[name] = build_http_app(make_model(name=name, beside=beside), sources[name], settings, pool=kept, gate=gate)
    app = several(doors, max_body_bytes=10_000, body_timeout_s=5)
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        yield client, sources


def test_a_request_goes_to_the_model_it_names():
    """The official client sees two models and gets each one's answer, streamed and not; a third is a 404 that names both."""

    async def story() -> None:
        async with door() as (http, sources):
            client = AsyncOpenAI(base_url="http://door/v1", api_key="none", http_client=http)
            assert [card.id async for card in await client.models.list()] == list(SAYS)
            assert (await client.models.retrieve("second/one")).id == "second/one"
            for name, says in SAYS.items():
                answer = await client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Who?"}])
                assert answer.choices[0].message.content == says and answer.model == name
                stream = await client.completions.create(model=name, prompt="Who?", stream=True)
                assert "".join([event.choices[0].text async for event in stream if event.choices]) == says
                assert len(sources[name].requests) == 2
            with pytest.raises(NotFoundError, match="third.*first.*second/one"):
                await client.chat.completions.create(model="third", messages=[{"role": "user", "content": "Who?"}])

    asyncio.run(story())


def test_what_names_no_model_is_the_first_doors():
    """Broken JSON, a body without a model and one that is too long are refused as by a door alone; token calls go to the first."""

    async def story() -> None:
        async with door() as (http, _):
            broken = await http.post("/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"})
            assert broken.status_code == 400 and broken.json()["error"]["type"] == "invalid_request_error"
            long = await http.post("/tokenize", json={"prompt": "x" * 20_000})
            assert long.status_code in (200, 413)
            assert (await http.post("/tokenize", json={"prompt": "one"})).status_code == 200
            assert (await http.post("/tokenize", json={"prompt": "one", "model": "second/one"})).status_code == 200
            assert (await http.get("/nowhere")).status_code == 404

    asyncio.run(story())


def test_nothing_is_read_of_a_caller_without_a_key():
    """A stranger's body must not cost memory before the 401; who has a key is served by the model it names."""
    read: list[int] = []

    async def body() -> AsyncGenerator[bytes]:
        for number in range(3):
            read.append(number)
            yield b"x" * 1000

    async def story() -> None:
        async with door(keys=("secret",)) as (http, sources):
            kind = {"Content-Type": "application/json"}
            assert (await http.post("/v1/completions", content=body(), headers=kind)).status_code == 401
            assert read == []
            asked = {"model": "second/one", "prompt": "Who?"}
            answer = await http.post("/v1/completions", json=asked, headers={"Authorization": "Bearer secret"})
            assert answer.status_code == 200 and len(sources["second/one"].requests) == 1

    asyncio.run(story())


def test_a_tenants_limits_hold_for_all_models_together(tmp_path):
    """A tenant with a rate of 6 a minute could send so many to each model; now what one model took the other has not."""
    file = tmp_path / "keys.yaml"
    file.write_text("tenants: [{name: a, api_keys: [secret], requests_per_minute: 6}]")

    async def story() -> None:
        async with door(file=str(file)) as (client, _):
            client.headers["Authorization"] = "Bearer secret"
            bodies = [{"model": name, "prompt": "Hi", "max_tokens": 1} for name in SAYS]
            answers = [await client.post("/v1/completions", json=body) for body in bodies]
            assert [answer.status_code for answer in answers] == [200, 429]

    asyncio.run(story())


def test_readiness_books_and_metrics_are_those_of_all_models():
    """/ready is 200 when every model answers; /debug/pool has a pool per model; /metrics has each family once."""

    async def story() -> None:
        async with door() as (http, _):
            assert (await http.get("/ready")).status_code == 200
            books = (await http.get("/debug/pool")).json()
            assert {name: list(book["replicas"]) for name, book in books.items()} == {name: [name] for name in SAYS}
            text = (await http.get("/metrics")).text
            families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
            assert len(families) == len(set(families)) and all(f'"{name}"' in text for name in SAYS)
        async with door(second=NoReplicaError("none is there")) as (http, _):
            assert (await http.get("/ready")).status_code == 503

    asyncio.run(story())


def test_merging_keeps_every_sample():
    """Two texts that share a counter and a histogram become one text with the samples of both."""
    one = '# HELP asked_total Asked.\n# TYPE asked_total counter\nasked_total{model="a"} 2.0\n'
    two = '# HELP asked_total Asked.\n# TYPE asked_total counter\nasked_total{model="b"} 3.0\n# HELP up Up.\n# TYPE up gauge\nup 1.0\n'
    text = merged([one, two]).decode()
    assert text.count("# TYPE asked_total") == 1
    assert {'asked_total{model="a"} 2.0', 'asked_total{model="b"} 3.0', "up 1.0"} <= set(text.splitlines())


def test_models_share_the_router_and_have_names_of_their_own():
    """`models:` is a list beside `router:`; two of one name, or a router inside an entry, are errors that say so."""
    models = parse_models(
        {"router": {"api_keys": ["k"]}, "models": [{"model": "/a/one"}, {"model": "/a/two", "max_queue_size": 3}]}
    )
    assert [model.model_name for model in models] == ["one", "two"] and all(model.router.api_keys == ("k",) for model in models)
    assert (models[0].max_queue_size, models[1].max_queue_size) == (256, 3)
    for values, says in (
        ({"models": []}, "models must be a list"),
        ({"models": [{"model": "/a/one"}, {"model": "/b/one"}]}, "of different names"),
        ({"models": [{"model": "/a/one", "router": {}}]}, r"models\[0\] must be free of router"),
        ({"models": [{"model": "/a/one"}], "pool": {}}, "unknown setting 'pool'"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse_models(values)
