"""Serve a model, or the applications of a YAML file, over HTTP: checks every setting first, then starts Ray Serve.

Owns the command line's arguments and the order of a start: settings are checked and the model is fetched here, with progress
bars, before the first process starts. Knows `app.py`'s settings; Ray is imported only when there is something to start.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ..engine.model_source import resolve_model
from ..errors import CbRayError, ConfigError
from ..user_cache import user_cache_dir
from . import haproxy
from .args import AppArgs, parse_models

BUILDER = "cb_ray.serving.app:build"
NAME = "cb-ray"
# Ray Serve's settings for many small messages: HAProxy in front, replicas that talk directly, and a router with a loop of its
# own so that plain Python callers keep working. A stream may live half an hour behind a proxy that reloads, and a replica that
# stops lingers for two seconds, not thirty: the proxy is told at once, and no other balancer is there to be waited for. A request
# to which a Router has said nothing when its connection ends goes to another one: it was on its way while that Router left or died.
# Ray reads them when it starts; what the user has set stays. Workers are as nice as anyone, so that the door goes before engines that
# compute on the same CPU, which are nicer.
DATA_PLANE = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "1800",
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    "RAY_worker_niceness": "0",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        nargs="?",
        default=AppArgs.__dataclass_fields__["model"].default,
        help="a model (hub id, directory, .gguf file, demo:smollm2-135m) or a Serve config file (.yaml); default: %(default)s",
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call the model; default: from its source")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s; 0.0.0.0 for all)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="any setting of the app, as in deployments/app.yaml; for instance --set engine.page_size=32 (may be repeated)",
    )
    parser.add_argument(
        "--save", metavar="FILE", help="also write these settings as a Serve config file, for `serve run` or Kubernetes"
    )
    parser.add_argument("--check", action="store_true", help="check the settings and stop")
    parser.add_argument("--fetch", action="store_true", help="check the settings, fetch the model and stop")


def run(given: argparse.Namespace) -> int:
    """Start and stay until interrupted. Raises ConfigError for a wrong setting before anything is started."""
    target: str = given.target
    from_file = target.endswith((".yaml", ".yml"))
    if from_file and (given.settings or given.served_model_name or given.save):
        raise ConfigError(f"{target} holds all settings of its applications; change them there instead of on the command line")
    apps = read_applications(Path(target)) if from_file else {NAME: settings_of(given)}
    parsed = [(name, args) for name, values in apps.items() for args in parse_models(values)]
    if not from_file:
        written = save(apps[NAME], given)
        print(f"settings: {written}", file=sys.stderr)
    if given.check:
        for name, args in parsed:
            print(f"{name}: serves {args.model} as {args.model_name}; the settings are right")
        return 0
    for _, args in parsed:
        resolve_model(args.model)  # now and with progress bars, rather than in a replica whose log nobody reads
    if given.fetch:
        return 0
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("serving needs Ray Serve; pip install 'cb-ray[serve]' brings it")
    for variable, value in DATA_PLANE.items():
        os.environ.setdefault(variable, value)
    if path := haproxy.command_path():
        os.environ.setdefault(haproxy.VARIABLE, path)
    return _serve_file(target) if from_file else _serve(apps[NAME], host=given.host, port=given.port)


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """The app's settings as the command line gives them, nested as in YAML."""
    target: str = given.target
    here = Path(target).expanduser()
    settings: dict[str, Any] = {"model": str(here.resolve()) if here.exists() else target}  # replicas run in other directories
    if given.served_model_name:
        settings["served_model_name"] = given.served_model_name
    for assignment in given.settings:
        key, equals, text = assignment.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"--set needs KEY=VALUE, for instance engine.page_size=32; got {assignment!r}")
        *rooms, last = key.split(".")
        place = settings
        for room in rooms:
            place = place.setdefault(room, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {assignment}: {room} is a value, not a group of settings", field=key)
        place[last] = yaml.safe_load(text)
    return settings


def save(settings: Mapping[str, Any], given: argparse.Namespace) -> Path:
    """Write what is served as a Serve config file: where --save says, else into the user's cache. Raises ConfigError."""
    file = Path(given.save) if given.save else user_cache_dir() / "served.yaml"
    app = {"name": NAME, "route_prefix": "/", "import_path": BUILDER, "args": dict(settings)}
    config = {"http_options": {"host": given.host, "port": given.port}, "applications": [app]}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            f"# Written by cb-ray serve; `serve run {file.name}` serves the same.\n" + yaml.safe_dump(config, sort_keys=False)
        )
    except OSError as error:
        raise ConfigError(f"cannot write the settings to {file}: {error.strerror}", field="save") from error
    return file


def read_applications(file: Path) -> dict[str, Mapping[str, Any]]:
    """`args` of every cb-ray application in a Serve config file, by name. Other applications in it are Serve's business."""
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no valid YAML: {error}") from error
    applications: list[Any] = content.get("applications") or [] if isinstance(content, dict) else []
    ours: dict[str, Mapping[str, Any]] = {
        str(app.get("name", "default")): app.get("args") or {}
        for app in applications
        if isinstance(app, dict) and app.get("import_path") == BUILDER
    }
    if not ours:
        raise ConfigError(f"{file} has no application with import_path {BUILDER}; deployments/app.yaml shows one")
    return ours


def _serve(settings: Mapping[str, Any], *, host: str, port: int) -> int:
    from ray import serve

    from .app import build

    def start() -> None:
        serve.start(http_options={"host": host, "port": port})
        serve.run(build(dict(settings)), name=NAME, route_prefix="/")
        names = ", ".join(args.model_name for args in parse_models(settings))
        print(f"{names} is served at http://{host}:{port}/v1; Ctrl-C ends it", flush=True)

    return _stay(start)


def _serve_file(file: str) -> int:
    from ray.serve.scripts import cli

    def start() -> None:
        try:
            with cli.make_context("serve", ["run", "--non-blocking", file]) as context:  # its `main` would rename an interrupt
                cli.invoke(context)
        except Exception as error:  # click's own errors, whose message is the whole story
            raise CbRayError(str(error)) from error

    return _stay(start)


def _stay(start: Callable[[], None]) -> int:
    """Connect to Ray, `start`, and serve until SIGINT or SIGTERM; then everything that was started ends, quietly."""
    import ray

    from .ending import shut_down

    ray.init(namespace="serve")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C; the handler that Ray has just set would dump a stack
    try:
        start()
        signal.pause()
    except KeyboardInterrupt:
        print("stopping", file=sys.stderr)
    finally:
        shut_down()
    return 0
