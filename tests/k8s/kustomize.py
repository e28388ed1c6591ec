"""What `kubectl kustomize` makes of a folder, as far as the manifests of this project need it; anything else is refused loudly.

Covers resources (files and folders), components, `patches` (JSON patches, and merge patches, which replace lists, as kustomize does
for kinds whose schema it does not know), `images`, `labels` on metadata and `configMapGenerator` from files. Knows no cluster.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
_KNOWN = {"apiVersion", "kind", "resources", "components", "patches", "images", "labels", "configMapGenerator"}


def build(folder: Path) -> list[Object]:
    """All objects of the kustomization in `folder`. Raises AssertionError for what is wrong or not understood."""
    return _apply(folder, [])


def _apply(folder: Path, objects: list[Object]) -> list[Object]:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert kustomization.keys() <= _KNOWN, f"{folder}: this builder does not know {kustomization.keys() - _KNOWN}"
    own: list[Object] = []
    for name in kustomization.get("resources", ()):
        path = (folder / name).resolve()
        own += _apply(path, []) if path.is_dir() else [item for item in yaml.safe_load_all(path.read_text()) if item]
    own += [_config_map(folder, wanted) for wanted in kustomization.get("configMapGenerator", ())]
    objects = objects + own
    identities = [_identity(item) for item in objects]
    assert len(set(identities)) == len(identities), f"{folder}: two objects of one kind and name"
    for component in kustomization.get("components", ()):
        path = (folder / component).resolve()
        assert yaml.safe_load((path / "kustomization.yaml").read_text())["kind"] == "Component", f"{path} is no component"
        objects = _apply(path, objects)
    for patch in kustomization.get("patches", ()):
        _patch(folder, patch, objects)
    for image in kustomization.get("images", ()):
        _rename(objects, image)
    for labels in kustomization.get("labels", ()):
        for item in objects:
            item["metadata"].setdefault("labels", {}).update(labels["pairs"])
    return objects


def _identity(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def _config_map(folder: Path, wanted: Object) -> Object:
    metadata = {"name": wanted["name"], "labels": dict(wanted.get("options", {}).get("labels", {}))}
    data = {Path(name).name: (folder / name).read_text() for name in wanted["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _patch(folder: Path, patch: Object, objects: list[Object]) -> None:
    content = yaml.safe_load((folder / patch["path"]).read_text() if "path" in patch else patch["patch"])
    wanted = (patch["target"]["kind"], patch["target"]["name"]) if "target" in patch else _identity(content)
    found = [item for item in objects if _identity(item) == wanted]
    assert len(found) == 1, f"{folder}: a patch is for {wanted}, found {len(found)} of them"
    if isinstance(content, list):
        for operation in content:
            _operate(found[0], operation)
    else:
        _merge(found[0], content)


def _merge(into: Object, patch: Object) -> None:
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)


def _operate(item: Object, operation: Object) -> None:
    *way, last = operation["path"].strip("/").split("/")
    place: Any = item
    for step in way:
        place = place[int(step)] if isinstance(place, list) else place[step]
    assert operation["op"] in ("add", "replace"), f"this builder does not know the operation {operation['op']}"
    assert operation["op"] == "add" or last in place, f"nothing to replace at {operation['path']}"
    if isinstance(place, list):
        place.append(operation["value"]) if last == "-" else place.__setitem__(int(last), operation["value"])
    else:
        place[last] = operation["value"]


def _rename(objects: list[Object], image: Object) -> None:
    for container in containers(objects):
        if container["image"] == image["name"]:
            container["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"


def containers(node: Any) -> Iterator[Object]:
    """Every container at any depth."""
    if isinstance(node, dict):
        yield from node.get("containers", ())
        for value in node.values():
            yield from containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from containers(value)
