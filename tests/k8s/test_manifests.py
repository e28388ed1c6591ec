"""The manifests say what they claim: they fit KubeRay's schema, serve the files of `deployments/`, and name things that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from .kustomize import Object, build, containers

ROOT = Path(__file__).resolve().parents[2]
K8S, DEPLOYMENTS = ROOT / "k8s", ROOT / "deployments"
CRD = ROOT.parent / "shared" / "k8s" / "ray.io_rayservices.yaml"
OVERLAYS = sorted(path.parent.name for path in (K8S / "overlays").glob("*/kustomization.yaml"))
COMPONENTS = sorted(path.parent.name for path in (K8S / "components").glob("*/kustomization.yaml"))


@cache
def objects(overlay: str) -> list[Object]:
    return build(K8S / "overlays" / overlay)


def with_component(tmp_path: Path, overlay: str, component: str) -> list[Object]:
    """An overlay and a component together, as a user's own kustomization would name them."""
    relative = Path(*[".."] * len(tmp_path.resolve().parts)) / K8S.relative_to("/")
    content = {"resources": [str(relative / "overlays" / overlay)], "components": [str(relative / "components" / component)]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return build(tmp_path)


def the(kind: str, name: str, among: list[Object]) -> Any:
    return next(item for item in among if item["kind"] == kind and item["metadata"]["name"] == name)


def strict(schema: Any) -> Any:
    """A CRD's schema as the API server reads it with `--validate=strict`: fields that it does not name are errors."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
    return result


@cache
def validator() -> jsonschema.Draft202012Validator:
    if not CRD.exists():
        pytest.skip(f"KubeRay's schema is not here ({CRD.name})")
    versions = yaml.load(CRD.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]["versions"]
    schema = next(version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1")
    schema["properties"]["metadata"] = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 41}}}
    return jsonschema.Draft202012Validator({**strict(schema), "properties": {**strict(schema["properties"]), "metadata": {}}})


def complaints(service: Object) -> list[str]:
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in validator().iter_errors(service)]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_fits_the_schema_of_kuberay(overlay):
    """A field that KubeRay does not know is dropped silently by the API server; here it is an error."""
    assert complaints(the("RayService", "cb-ray", objects(overlay))) == []


def test_the_schema_check_sees_a_wrong_field():
    """The check itself must be able to fail."""
    service = yaml.safe_load(yaml.safe_dump(the("RayService", "cb-ray", objects("cpu"))))
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["minReplica"] = 1
    service["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] = "yes"
    found = complaints(service)
    assert len(found) == 2 and any("minReplica" in line for line in found)


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_fits_every_overlay(component, tmp_path):
    """`components: [redis]` beside any overlay gives a valid RayService."""
    for overlay in OVERLAYS:
        folder = tmp_path / overlay
        folder.mkdir()
        assert complaints(the("RayService", "cb-ray", with_component(folder, overlay, component))) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_served_is_the_file_that_the_manifest_names(overlay):
    """Values have one home, `deployments/`; the copy inside a manifest parses to the same."""
    service = the("RayService", "cb-ray", objects(overlay))
    named = ROOT / service["metadata"]["annotations"]["cb-ray/serves"]
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == yaml.safe_load(named.read_text())


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_head_and_workers_read_the_same_settings_and_keep_their_ports(overlay):
    """Serve's variables must be on every pod, HTTP on the port that Serve listens on, and no container may gain rights."""
    service = the("RayService", "cb-ray", objects(overlay))["spec"]
    port = yaml.safe_load(service["serveConfigV2"])["http_options"]["port"]
    found = list(containers(service))
    assert len(found) == 1 + len(service["rayClusterConfig"]["workerGroupSpecs"])
    for container in found:
        assert {"configMapRef": {"name": "cb-ray-settings"}} in container["envFrom"]
        assert {"name": "serve", "containerPort": port} in container["ports"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["image"] in ("cb-ray:cpu", "cb-ray:gpu"), "a name that k8s/Dockerfile builds"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_outlive_the_streams_that_they_hold(overlay):
    """A replica may finish its streams for graceful_shutdown_timeout_s; its pod must not be killed before, nor the old cluster go."""
    from cb_ray.serving.args import parse_args

    service = the("RayService", "cb-ray", objects(overlay))["spec"]
    for app in yaml.safe_load(service["serveConfigV2"])["applications"]:
        longest = parse_args(app["args"]).pool.graceful_shutdown_timeout_s
        assert service["rayClusterDeletionDelaySeconds"] >= longest
        for group in service["rayClusterConfig"]["workerGroupSpecs"]:
            assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= longest


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_name_that_is_referred_to_exists(overlay):
    """Accounts, config maps, claims and secrets that pods mount are in the same overlay."""
    have = {(item["kind"], item["metadata"]["name"]) for item in objects(overlay)}
    kinds = {"serviceAccountName": "ServiceAccount", "claimName": "PersistentVolumeClaim", "secretName": "Secret"}
    found = {(kinds[key], value) for key, value in pairs(objects(overlay)) if key in kinds and isinstance(value, str)}
    for key, value in pairs(objects(overlay)):
        if key in ("configMapRef", "secretRef"):
            found.add(({"configMapRef": "ConfigMap", "secretRef": "Secret"}[key], value["name"]))
    assert found and found <= have


def test_gpu_pods_leave_cpus_to_others():
    """Scale to zero needs pods that hold nothing but an engine: no CPU is offered there, and the engine asks for none."""
    for overlay in ("gpu", "tp"):
        service = the("RayService", "cb-ray", objects(overlay))["spec"]
        (group,) = [item for item in service["rayClusterConfig"]["workerGroupSpecs"] if item["groupName"].startswith("gpu")]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        (app,) = yaml.safe_load(service["serveConfigV2"])["applications"]
        assert group["rayStartParams"]["num-cpus"] == "0" and app["args"]["engine"]["num_cpus"] == 0
        assert int(limits["nvidia.com/gpu"]) == app["args"]["engine"]["num_gpus"]
        assert group["maxReplicas"] == app["args"]["pool"]["max_replicas"]


def test_the_image_has_what_the_manifests_call():
    """The programs that probes, hooks and settings name are installed by the Dockerfile, and it runs as no root."""
    text = (K8S / "Dockerfile").read_text()
    settings = the("ConfigMap", "cb-ray-settings", objects("cpu"))["data"]
    assert settings["RAY_SERVE_HAPROXY_BINARY_PATH"] == "/opt/cb-ray/bin/cb-ray-haproxy"
    assert "/opt/cb-ray /opt/cb-ray" in text and re.search(r"^USER 1000:1000$", text, re.MULTILINE) and " wget " in text
    assert re.search(r"^ARG VARIANT=cpu$", text, re.MULTILINE)


def test_the_fast_path_is_the_one_that_cb_ray_serve_starts():
    """The variables of `cb-ray serve` and of the pods are the same."""
    from cb_ray.serving.command import DATA_PLANE

    settings = the("ConfigMap", "cb-ray-settings", objects("cpu"))["data"]
    assert {name: settings[name] for name in DATA_PLANE} == DATA_PLANE


def pairs(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield key, value
            yield from pairs(value)
    elif isinstance(node, list):
        for value in node:
            yield from pairs(value)
