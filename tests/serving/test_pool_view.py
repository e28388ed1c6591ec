"""What the door asks of the Board: places before tokenizing, explanations, metrics. With a real pool, without Ray."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError

from cb_ray.errors import QueueFullError
from cb_ray.routing.loads import Ask
from cb_ray.routing.members import Member
from cb_ray.routing.pool import PoolLimits
from cb_ray.serving.board import BoardActor, BoardState
from cb_ray.serving.board_weights import BoardWeights
from cb_ray.serving.http import build_http_app
from cb_ray.serving.pool_view import PoolView
from tests.serving.doors import DoorUnderTest, FakeSource, chat_body, error_of, make_model

LONG = "word " * 1000  # above what is tokenized at once


class LocalBoard:
    """The Board's methods over a real pool, called as an actor's are."""

    def __init__(self, limit: int = 2, slots: int = 1, dead: bool = False) -> None:
        self.actor = object.__new__(BoardActor)
        self.actor._state = BoardState(PoolLimits(max_queue_size=limit, page_size=4))
        self.actor._pool = self.pool = self.actor._state.pool
        self.actor._weights = BoardWeights(self.pool, clock=lambda: 0.0, apply=self.actor._state.apply)
        self.pool.members(0.0, [Member(replica=f"r{n}", slots=slots) for n in range(2)])
        self.dead, self.calls = dead, list[str]()

    def __getattr__(self, name: str) -> Any:
        board = self

        class Method:
            @staticmethod
            def remote(*args: Any) -> Any:
                async def call() -> Any:
                    board.calls.append(name)
                    if board.dead:
                        raise RayActorError
                    return await getattr(board.actor, name)(*args)

                return asyncio.ensure_future(call())

        return Method

    def fill(self, count: int) -> None:
        for number in range(count):
            self.pool.acquire(0.0, Ask(ticket=f"t{number}", request_id=f"other{number}"))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def door(board: LocalBoard | None, source_class: type[FakeSource] = FakeSource, clock: Clock | None = None) -> DoorUnderTest:
    async def find() -> Any:
        return board

    model = make_model(context_length=100_000)
    source = source_class(codec=model.codec)
    return DoorUnderTest(app=build_http_app(model, source, pool=PoolView(find, clock or Clock())), source=source, model=model)


def test_a_full_pool_refuses_a_long_prompt_before_it_is_tokenized(monkeypatch):
    """Tokenizing for seconds to say 429 afterwards is what makes an overload worse."""
    board = LocalBoard()
    board.fill(4)
    here = door(board)
    monkeypatch.setattr("cb_ray.serving.http.tokenize_chat", lambda *_: pytest.fail("it was tokenized"))
    for n in (1, 3):
        answer = here.chat(LONG, n=n)
        assert answer.status_code == 429 and error_of(answer)["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
    assert board.pool.snapshot(0.0)["places"] == 0


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_places_are_given_back_however_the_request_ends(ends):
    """A place is kept for each choice while the text is tokenized, and for nobody afterwards."""
    board = LocalBoard()
    here = door(board)
    here.source.fails = None if ends == "well" else QueueFullError(2, 2)
    answer = here.post("/v1/completions", {"model": "tiny", "prompt": [LONG, LONG], "n": 2})
    assert answer.status_code == (200 if ends == "well" else 429)
    assert board.calls.count("reserve") == board.calls.count("unreserve") == 4
    assert board.pool.snapshot(0.0)["places"] == 0


def test_while_the_pool_refuses_places_are_asked_for_first(monkeypatch):
    """In a storm of requests a refusal is one call to the Board: nothing is tokenized, nothing goes through a handle. A second after
    the last refusal nobody asks for a place any more."""
    board, clock = LocalBoard(), Clock()
    here = door(board, clock=clock)
    here.source.fails = QueueFullError(4, 4)
    assert here.chat("Hi").status_code == 429 and "reserve" not in board.calls
    board.fill(4)
    with monkeypatch.context() as patch:
        patch.setattr("cb_ray.serving.http.tokenize_chat", lambda *_: pytest.fail("it was tokenized"))
        assert [here.chat("Hi").status_code for _ in range(2)] == [429, 429]
    board.pool.release(0.0, "t3")
    here.source.fails = None
    assert here.chat("Hi").status_code == 200
    clock.now += 1.1
    assert here.chat("Hi").status_code == 200
    assert board.calls.count("reserve") == 3 and board.pool.snapshot(0.0)["places"] == 0
    assert board.calls.count("unreserve") == 1, "who was refused has no place to give back"


def test_short_prompts_cost_the_board_nothing_more():
    """Their tokens are made faster than a place is kept; the request itself is admitted or refused."""
    board = LocalBoard()
    assert door(board).chat("Hi").status_code == 200
    assert board.calls == []


@pytest.mark.parametrize("board", [None, LocalBoard(dead=True)])
def test_without_a_board_requests_are_served_and_there_is_nothing_to_explain(board):
    """Losing the Board costs no request; asking it why is answered with 503 and a sentence."""
    here = door(board)
    assert here.chat(LONG).status_code == 200
    assert here.get("/metrics").status_code == 200
    assert here.get("/debug/pool").status_code == here.post("/debug/route", {"prompt": "Hi"}).status_code == 503


def test_where_a_prompt_would_go_and_why():
    """A dry run names policy, reason, and the price of each replica, and reserves nothing."""
    board = LocalBoard()
    here = door(board)
    answer = here.post("/debug/route", {"model": "tiny", "prompt": "Hello there"}).json()
    assert answer["policy"] == "prefix_aware" and answer["reason"] == "nobody has this prefix"
    assert sorted(answer["order"]) == sorted(answer["prices_s"]) == ["r0", "r1"]
    assert answer["predicted_cached_tokens"] == 0 and answer["prompt_tokens"] > 1
    assert board.pool.num_leases == 0
    assert here.get("/debug/pool").json()["replicas"].keys() == {"r0", "r1"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_asks_is_told_why_its_request_went_where_it_went(stream):
    """X-Cb-Ray-Debug brings the decision in a header; nobody else pays for it."""
    board = LocalBoard()

    class Routed(FakeSource):
        def generate(self, request: Any) -> Any:
            board.actor._state.acquire(Ask(ticket=request.request_id, request_id=request.request_id, session=request.session))
            return super().generate(request)

    here = door(board, Routed)
    headers = {"x-cb-ray-debug": "1", "x-session-id": "mine"}
    answer = here.post("/v1/chat/completions", chat_body("Hi", stream=stream), headers)
    (decision,) = json.loads(answer.headers["x-cb-ray-decision"])
    assert decision["replica"] == decision["order"][0] and decision["waited_s"] == 0
    assert "x-cb-ray-decision" not in here.chat("Hi").headers


def test_the_pool_is_in_the_metrics():
    """One scrape shows who waits, what is owed, why replicas were chosen and how good the predictions were."""
    board = LocalBoard()
    board.fill(4)
    text = door(board).get("/metrics").text
    assert "cb_ray_pool_waiting 2.0" in text
    assert 'cb_ray_pool_decisions_total{reason="nobody has this prefix"} 2.0' in text
    assert 'cb_ray_replica_leases{replica="r0"} 1.0' in text
    assert "cb_ray_pool_predicted_tokens_total 0.0" in text and "cb_ray_pool_refused_total 0.0" in text
