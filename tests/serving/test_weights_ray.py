"""New weights for a pool of real engines on a real Ray, under load: nothing fails, and no token is of other weights than it says."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
import torch
from ray import serve

from cb_ray import RemoteManager
from cb_ray.errors import InvalidRequestError, NoReplicaError, UpdateRunningError, WeightsError
from cb_ray.messages import GenerationOutput, RequestStatus
from cb_ray.serving.app import Cluster, application, parse_args
from cb_ray.serving.ending import shut_down
from cb_ray.serving.replica_router import find_board
from tests.serving.teams import replicas
from tests.tiny import make_model

pytestmark = [pytest.mark.serve, pytest.mark.timeout(280)]
APP, NEW, REPLICAS = "cb-ray", 10, 3
numbers = itertools.count()
dice = random.Random(0)


@pytest.fixture(scope="module")
def manager(tiny_model_dir) -> Iterator[RemoteManager]:
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 * 2**20)
    try:
        serve.start(proxy_location="Disabled")
        args = {
            "model": str(tiny_model_dir),
            "max_queue_size": 64,
            "pool": {"min_replicas": REPLICAS, "max_replicas": REPLICAS, "slots_per_replica": 8, "health_check_period_s": 1},
            "engine": {"num_cpus": 0.1, "num_threads": 1, "page_size": 4, "num_blocks": 400, "dtype": "float32"},
        }
        serve.run(application(parse_args(args), cluster=Cluster(num_cpus=2, num_gpus=0)), name=APP, route_prefix="/")
        with RemoteManager(APP) as manager:
            yield manager
    finally:
        shut_down()


class Weights:
    """Models that are told apart by what they say: version 0 is the pool's own."""

    def __init__(self) -> None:
        self.models: dict[int, Any] = {0: make_model("llama", eos_token_id=3)}
        self.prompts = [[dice.randrange(4, 300) for _ in range(9)] for _ in range(6)]
        self._said: dict[tuple[int, int], list[int]] = {}

    def add(self, version: int, seed: int) -> Any:
        self.models[version] = make_model("llama", seed=seed, eos_token_id=3)
        return self.models[version]

    def says(self, version: int, number: int) -> list[int]:
        """What this version says to prompt `number`."""
        if (version, number) not in self._said:
            ids = torch.tensor([self.prompts[number]])
            out = self.models[version].generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
            )
            self._said[version, number] = out[0, ids.shape[1] :].tolist()
        return self._said[version, number]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights()


class Load:
    """Requests without a pause from several threads, each checked against the version that it says made it."""

    def __init__(self, manager: RemoteManager, weights: Weights, threads: int = 4) -> None:
        self._manager, self._weights = manager, weights
        self._end = threading.Event()
        self.outputs: list[tuple[int, GenerationOutput]] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        while len(self.outputs) < 4:
            self._end.wait(0.01)
        return self

    def _ask(self) -> None:
        while not self._end.is_set():
            number = next(numbers) % len(self._weights.prompts)
            name = self._manager.add_request(self._weights.prompts[number], max_new_tokens=NEW, do_sample=False, ignore_eos=True)
            output = self._manager.get_result(name, timeout=120)
            assert output is not None
            self.outputs.append((number, output))

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> set[tuple[int, ...]]:
        """Nothing failed; what was made under one version is what that version says. Returns all versions seen."""
        seen: set[tuple[int, ...]] = set()
        for number, output in self.outputs:
            assert (output.status, output.error) == (RequestStatus.FINISHED, None)
            assert len(output.generated_tokens) == NEW
            seen.add(output.weights_versions)
            if len(output.weights_versions) == 1:
                assert output.generated_tokens == self._weights.says(output.weights_versions[0], number)
        return seen


def all_say(manager: RemoteManager, weights: Weights, version: int) -> None:
    """Every replica answers, and with the words of this version; pages of another are not found."""
    outputs = manager.generate_batch(
        weights.prompts * REPLICAS, NEW, progress_bar=False, do_sample=False, ignore_eos=True
    ).values()
    for number, output in enumerate(outputs):
        assert output.weights_versions == (version,)
        assert output.generated_tokens == weights.says(version, number % len(weights.prompts))


def test_a_rolling_update_under_load(manager, weights, tmp_path):
    """From a directory: no request fails, none waits for a replica that stands still, all tokens are of the version they name."""
    weights.add(1, seed=1).save_pretrained(tmp_path)
    with Load(manager, weights) as load:
        done = manager.update_weights(tmp_path)
        all_say(manager, weights, 1)
    assert (done.version, len(done.replicas)) == (1, REPLICAS) and done.fingerprint
    seen = load.check()
    assert {(0,), (1,)} <= seen <= {(0,), (1,), (0, 1)}
    assert manager.pool()["weights"] == {"wanted": 1, "update": None, "versions": dict.fromkeys(done.replicas, 1)}


def test_all_at_once_from_tensors_in_the_object_store(manager, weights):
    """As a training loop does it, from a handle: a state dict by reference; streams that run compute again under the new weights."""
    state = ray.put({name: value.numpy() for name, value in weights.add(2, seed=2).state_dict().items()})
    with Load(manager, weights) as load:
        handle = serve.get_app_handle(APP)
        done = handle.update_weights.remote(state, mode="all_at_once", in_flight="recompute").result()
        del state
        all_say(manager, weights, 2)
    assert done.version == 2
    assert load.check() <= {(1,), (2,), (1, 2)}


def test_a_pause_of_the_whole_pool(manager, weights):
    """Requests handed in meanwhile wait, and are answered when it ends."""
    with manager.pause():
        names = [manager.add_request(prompt, max_new_tokens=NEW, do_sample=False) for prompt in weights.prompts]
        assert manager.get_result(timeout=0.3) is None
    assert all(manager.get_result(name, timeout=120) is not None for name in names)


def test_weights_that_one_replica_refuses_change_nothing(manager, weights):
    """Names that do not fit, other weights on each replica, and a version that is used: errors that say so, and the old answers."""
    with pytest.raises(WeightsError, match=r"replica \w+: the source lacks"):
        manager.update_weights({"model.norm.weight": torch.zeros(64)})

    def by_chance() -> dict[str, Any]:
        made = make_model("llama", eos_token_id=3).state_dict()
        return {**made, "model.norm.weight": torch.full((64,), float(os.getpid()))}

    with pytest.raises(WeightsError, match="read other weights from this source"):
        manager.update_weights(by_chance)
    with pytest.raises(InvalidRequestError, match="must rise"):
        manager.update_weights(dict, weights_version=1)
    with pytest.raises(InvalidRequestError, match="all_at_once"):
        manager.update_weights(dict, mode="at_once")  # type: ignore[arg-type]
    all_say(manager, weights, 2)


def test_streams_may_finish_first_and_a_second_update_is_told(manager, weights):
    """With `finish` no stream has two versions; while it waits for them, another update is refused."""
    made = weights.add(7, seed=7)
    names = [manager.add_request(weights.prompts[n % 6], max_new_tokens=300, do_sample=False, ignore_eos=True) for n in range(6)]
    result: list[Any] = []
    thread = threading.Thread(
        target=lambda: result.append(manager.update_weights(made.state_dict(), in_flight="finish", weights_version=7))
    )
    thread.start()
    while not manager.pool()["weights"]["update"]:
        pass
    with pytest.raises(UpdateRunningError, match="version 7"):
        manager.update_weights(made.state_dict())
    thread.join()
    assert result[0].version == 7
    for name in names:
        output = manager.get_result(name, timeout=120)
        assert (output.status, output.weights_versions, len(output.generated_tokens)) == (RequestStatus.FINISHED, (2,), 300)
    all_say(manager, weights, 7)


def test_a_new_replica_and_a_new_board_know_the_weights(manager, weights):
    """What Serve makes anew has the pool's weights before it serves: a replica from the Board, the Board from the replicas."""
    with Load(manager, weights, threads=2) as load:
        before = set(manager.pool()["replicas"])
        replicas(APP)[0].kill()
        while len(now := set(manager.pool()["replicas"])) < REPLICAS or now == before:
            pass
        all_say(manager, weights, 7)
        ray.kill(find_board(APP, "Engine"))
        while True:
            with contextlib.suppress(NoReplicaError):
                if manager.pool()["weights"] == {"wanted": 7, "update": None, "versions": dict.fromkeys(now, 7)}:
                    break
        replicas(APP)[0].kill()  # the object store's copy went with the old Board; a replica gave it another one
        while len(later := set(manager.pool()["replicas"])) < REPLICAS or later == now:
            pass
    load.check()
    all_say(manager, weights, 7)
    weights.add(8, seed=8)
    assert manager.update_weights(weights.models[8].state_dict()).version == 8
    all_say(manager, weights, 8)
