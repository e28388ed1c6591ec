"""What `replica_router.py` takes for granted of Ray Serve's private API, checked against the installed Ray, without a cluster.

`test_pool_ray.py` checks that it works; this says which assumption broke when a new Ray changes something.
"""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("ray")

from ray.serve._private import router as serve_router
from ray.serve._private.common import DeploymentTargetInfo, RunningReplicaInfo
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace
from ray.serve._private.utils import get_deployment_actor_name
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter

from cb_ray.serving.replica_router import BOARD, BoardRouter, find_board, routing_loop


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_hook_where_a_replica_is_chosen():
    """Serve calls it with the pending request and whether a replica refused it before, and uses what it returns."""
    assert parameters(RequestRouter._choose_replica_for_request) == ["self", "pending_request", "is_retry"]
    assert parameters(BoardRouter._choose_replica_for_request) == ["self", "pending_request", "is_retry"]
    source = inspect.getsource(serve_router.AsyncioRouter._route_and_send_request_once)
    assert "._choose_replica_for_request(" in source and ".on_request_routed(" in source and "is_retry=is_retry" in source


def test_the_hooks_after_it():
    """The result is handed over when the replica took the request; deaths are told."""
    for name in ("on_request_routed", "on_replica_actor_died", "update_replicas", "choose_replicas", "initialize_state"):
        assert callable(getattr(RequestRouter, name)), name
    assert parameters(RequestRouter.on_request_routed) == ["self", "pending_request", "replica_id", "result"]
    assert issubclass(BoardRouter, FIFOMixin), "without it, calls that share a request id hang when Serve's own way is taken"


def test_what_a_pending_request_holds():
    """The call's keyword arguments, among them `request`; and it takes an attribute of ours."""
    assert {"args", "kwargs", "metadata", "created_at", "routing_context"} <= set(PendingRequest.__dataclass_fields__)
    assert hasattr(PendingRequest.__dataclass_fields__["routing_context"].default_factory(), "should_backoff")
    assert not hasattr(PendingRequest, "__slots__")


def test_what_is_told_of_replicas():
    """The list of running replicas comes by long poll, each with a name and what it said of itself."""
    assert LongPollNamespace.DEPLOYMENT_TARGETS
    assert "running_replicas" in DeploymentTargetInfo.__dataclass_fields__
    assert {"replica_id", "replica_metadata"} <= set(RunningReplicaInfo.__dataclass_fields__)
    assert parameters(LongPollClient.__init__)[1:5] == ["host_actor", "key_listeners", "call_in_event_loop", "client_id"]


def test_how_a_deployments_actor_is_called(monkeypatch):
    """Its name begins with application and deployment and ends with the Board's, so that it is found without a replica."""
    from ray.serve._private.common import DeploymentID

    name = get_deployment_actor_name(DeploymentID(name="Engine", app_name="cb-ray"), BOARD, code_version="v7")
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.util.list_named_actors", lambda all_namespaces: [{"name": name, "namespace": "serve"}])
    monkeypatch.setattr("ray.get_actor", lambda found, namespace: (found, namespace))
    assert find_board("cb-ray", "Engine") == (name, "serve")
    assert find_board("cb-ray", "Other") is None


def test_the_loop_on_which_handles_are_routed():
    """One for the process, kept where it is made, in a thread that runs it for good."""
    source = inspect.getsource(serve_router.SingletonThreadRouter._get_singleton_asyncio_loop)
    assert "cls._asyncio_loop = asyncio.new_event_loop()" in source and "cls._asyncio_loop.run_forever()" in source
    loop = routing_loop()
    assert loop is None or loop.is_running()
