"""From settings to Serve's options: what a user writes is what runs, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

pytest.importorskip("ray")

from cb_ray.errors import ConfigError
from cb_ray.serving.app import Cluster, application, engine_options, parse_args, parse_models, placement, router_options, settle
from cb_ray.serving.args import AppArgs
from cb_ray.serving.tensor_parallel import by_node

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"
LAPTOP, GPUS = Cluster(num_cpus=2, num_gpus=0), Cluster(num_cpus=64, num_gpus=8)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"modle": "x"}, "did you mean 'model'"),
        ({"pool": {"max_replica": 3}}, "unknown setting 'pool.max_replica'; did you mean 'max_replicas'"),
        ({"pool": {"max_replicas": "3"}}, "pool.max_replicas must be of type int, got '3'"),
        ({"pool": {"min_replicas": 3, "max_replicas": 2}}, "at least min_replicas"),
        ({"routing": {"policy": "fastest"}}, "one of prefix_aware, least_work, power_of_two, round_robin"),
        ({"engine": {"pagesize": 16}}, "unknown setting 'engine.pagesize'; did you mean 'page_size'"),
        ({"engine": {"page_size": 1}}, "page_size"),
        ({"engine": {"dtype": "int8"}}, "engine.dtype"),
        ({"max_queue_size": -1}, "max_queue_size"),
        ({"max_queue_size": True}, "max_queue_size"),
        ({"router": []}, "router must be a mapping"),
        ({"pool": {"lease_timeout_s": 0}}, "pool.lease_timeout_s"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_wanted(values, says):
    """A typing error must not become a default that nobody notices."""
    with pytest.raises(ConfigError) as caught:
        parse_args(values)
    assert says in str(caught.value)


def test_what_is_left_out_has_defaults_and_what_is_null_too():
    """`pool:` with nothing below it is YAML for None, and means the defaults."""
    assert parse_args({"pool": None, "engine": None}) == AppArgs()
    assert parse_args({}).slots_per_replica == 256
    assert parse_args({"engine": {"max_requests_per_batch": 12}}).slots_per_replica == 12


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo:smollm2-135m", "smollm2-135m"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/models/mine/", "mine"),
        ("./chat.Q4_K_M.gguf", "chat.Q4_K_M"),
    ],
)
def test_the_served_name_comes_from_the_source(model, name):
    """Clients name the model as its author did, never by a path of the server."""
    assert parse_args({"model": model}).model_name == name
    assert parse_args({"model": model, "served_model_name": "chat"}).model_name == "chat"


def test_replicas_share_a_laptop_and_take_a_gpu_each_where_there_are_some():
    """The same file runs on both; two replicas on one machine must neither starve nor push each other out of memory."""
    args = parse_args({"pool": {"min_replicas": 1, "max_replicas": 2}})
    cpu = settle(args, LAPTOP)
    assert (cpu.num_gpus, cpu.num_threads) == (0.0, 1)
    assert cpu.num_cpus is not None and 2 * cpu.num_cpus + args.router.num_cpus <= LAPTOP.num_cpus
    assert cpu.config["max_memory_percent"] == pytest.approx(0.2)
    gpu = settle(args, GPUS)
    assert (gpu.num_gpus, gpu.num_cpus) == (1.0, 1.0) and "max_memory_percent" not in gpu.config
    assert settle(parse_args({"engine": {"device": "cpu"}}), GPUS).num_gpus == 0.0
    assert settle(parse_args({"engine": {"device": "cuda"}}), LAPTOP).num_gpus == 1.0, "a GPU node may still be on its way"
    assert settle(parse_args({"engine": {"tensor_parallel_size": 4}}), GPUS).num_gpus == 4.0
    chosen = parse_args({"engine": {"num_cpus": 3, "num_threads": 5, "num_blocks": 9}, "pool": {"max_replicas": 2}})
    engine = settle(chosen, LAPTOP)
    assert (engine.num_cpus, engine.num_threads) == (3.0, 5) and "max_memory_percent" not in engine.config


def test_serve_gets_the_options_that_the_settings_mean():
    """Serve's own queue is off, its limit lies above the Board's, and every deployment drains long enough."""
    args = parse_args({"max_queue_size": 7, "pool": {"slots_per_replica": 3, "graceful_shutdown_timeout_s": 90}})
    options = engine_options(args, settle(args, LAPTOP))
    assert options["num_replicas"] == 1 and "autoscaling_config" not in options
    assert options["max_queued_requests"] == router_options(args)["max_queued_requests"] == -1
    assert options["max_ongoing_requests"] > args.slots_per_replica
    assert options["user_config"]["max_queue_size"] == 7
    assert options["graceful_shutdown_timeout_s"] == router_options(args)["graceful_shutdown_timeout_s"] == 90


def test_a_range_of_replicas_scales_by_our_policy_alone():
    """Delays are the policy's; Serve adding its own would count them twice."""
    args = parse_args({"pool": {"min_replicas": 0, "max_replicas": 4, "target_drain_s": 3}})
    scaling = engine_options(args, settle(args, LAPTOP))["autoscaling_config"]
    assert (scaling.min_replicas, scaling.max_replicas) == (0, 4)
    assert scaling.upscale_delay_s == scaling.downscale_delay_s == 0
    assert scaling.metrics_interval_s <= 1.0


@pytest.mark.parametrize("path", sorted(DEPLOYMENTS.glob("app*.yaml")), ids=lambda path: path.name)
def test_every_deployment_file_builds(path):
    """A file in deployments/ holds values only, all of them known, and gives an application of Router and Engine."""
    config = yaml.safe_load(path.read_text())
    (app,) = config["applications"]
    assert (app["name"], app["import_path"], app["route_prefix"]) == ("cb-ray", "cb_ray.serving.app:build", "/")
    assert set(app) <= {"name", "import_path", "route_prefix", "args", "runtime_env"}, (
        "options come from args, not from overrides"
    )
    built = application(parse_models(app["args"]), cluster=LAPTOP)
    assert built._bound_deployment.name == "Router"


def test_a_tensor_parallel_replica_asks_for_a_bundle_for_each_rank():
    """Resources are a replica's and shared out; bundles of one's own, custom resources and labels go to Ray as they are."""
    options = placement(settle(parse_args({"engine": {"tensor_parallel_size": 4, "num_cpus": 2}}), GPUS))
    assert options["placement_group_bundles"] == [{"CPU": 0.5, "GPU": 1.0}] * 4
    assert options["placement_group_strategy"] == "PACK"
    assert options["ray_actor_options"] == {"num_cpus": 0.5, "num_gpus": 1.0, "resources": {}}
    given = {
        "tensor_parallel_size": 2,
        "placement_group_strategy": "SPREAD",
        "placement_group_bundles": [{"CPU": 1, "fast": 1}, {"CPU": 0.5}],
        "label_selector": {"zone": "a"},
    }
    options = placement(settle(parse_args({"engine": given}), LAPTOP))
    assert options["placement_group_bundles"] == given["placement_group_bundles"]
    assert options["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 0, "resources": {"fast": 1}}
    assert options["placement_group_bundle_label_selector"] == [{"zone": "a"}]
    nothing = placement(settle(parse_args({"engine": {"tensor_parallel_size": 2, "num_cpus": 0}}), LAPTOP))
    assert nothing["placement_group_bundles"] == [{"CPU": 0.01}] * 2
    one = placement(
        settle(parse_args({"engine": {"num_cpus": 1, "resources": {"fast": 1}, "label_selector": {"zone": "!b"}}}), LAPTOP)
    )
    assert one == {
        "ray_actor_options": {"num_cpus": 1.0, "num_gpus": 0.0, "resources": {"fast": 1}, "label_selector": {"zone": "!b"}}
    }


@pytest.mark.parametrize("bundles", [[{"CPU": 1}], [{"CPU": 1}, {}], [{"CPU": 1}, {"CPU": 0}], [{"CPU": 1}, "CPU"]])
def test_bundles_that_are_not_one_for_each_rank_are_refused(bundles):
    """The setting is named, with what is wanted of it."""
    with pytest.raises(ConfigError, match=r"engine\.placement_group_bundles must be a list of 2 mappings"):
        parse_args({"engine": {"tensor_parallel_size": 2, "placement_group_bundles": bundles}})


def test_ranks_are_numbered_node_by_node():
    """The first rank is bundle 0; those on its node come next, so that neighbours are near."""
    assert by_node({"bundles_to_node_id": {0: "b", 1: "a", 2: "b", 3: "a", 4: "c"}}) == [0, 2, 1, 3, 4]
