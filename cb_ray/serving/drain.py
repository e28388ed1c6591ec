"""Empty the Ray node on this machine before it goes: its replicas start elsewhere, finish their streams, and leave.

Owns the order of a node's departure: Ray is told not to use the node, Serve starts replacements on others, the replicas here end
when their last stream has, and this returns. For a pod's `preStop` hook, which Kubernetes runs before it stops the container:

    preStop ─▶ drain ─▶ replacements ready elsewhere ─▶ streams here end ─▶ replicas gone ─▶ SIGTERM

Knows processes and one command of Ray's; no model, no HTTP.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

from ..errors import CbRayError, ConfigError

REPLICA = "ray::ServeReplica:"  # how Ray titles the process of a Serve replica
_NODE_FLAGS = ("--node_id=", "--node-id=")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--deadline", type=float, default=600.0, metavar="SECONDS", help="how long streams may take (default: %(default)s)"
    )
    parser.add_argument("--node-id", metavar="HEX", help="which node, where several run on this machine")


def run(given: argparse.Namespace) -> int:
    """0 once no replica is left here, 1 when the deadline came first. Raises ConfigError where there is no node to drain."""
    ends = time.monotonic() + given.deadline
    node_id, raylet = find_node(given.node_id)
    tell_ray(node_id, given.deadline)
    waiting = replicas_under(raylet)
    print(f"node {node_id[:12]} takes no more work; {len(waiting)} replicas finish their streams", file=sys.stderr)
    left = wait_for(waiting, ends)
    if left:
        print(f"{len(left)} replicas were still at work after {given.deadline:g} s", file=sys.stderr)
    return 1 if left else 0


def find_node(wanted: str | None) -> tuple[str, psutil.Process]:
    """(node id, its raylet) of the Ray node on this machine. Raises ConfigError: none, several, or not the one that was named."""
    found = dict(nodes_here())
    if wanted is None and len(found) == 1:
        return next(iter(found.items()))
    if wanted in found:
        return wanted, found[wanted]
    names = ", ".join(sorted(found)) or "none"
    raise ConfigError(f"--node-id must name the Ray node on this machine to drain; running here: {names}", field="node_id")


def nodes_here() -> Sequence[tuple[str, psutil.Process]]:
    """The Ray nodes of this machine: (node id, raylet)."""
    found: list[tuple[str, psutil.Process]] = []
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] != "raylet":
            continue
        ids = [part.partition("=")[2] for part in process.info["cmdline"] or () if part.startswith(_NODE_FLAGS)]
        found += [(node_id, process) for node_id in ids[:1]]
    return found


def tell_ray(node_id: str, deadline_s: float) -> None:
    """Ask Ray to drain the node. Raises CbRayError with Ray's own words when it refuses."""
    reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "its pod is stopping")
    command = (sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", node_id, *reason)
    asked = subprocess.run((*command, "--deadline-remaining-seconds", str(int(deadline_s))), capture_output=True, text=True)
    if asked.returncode:
        raise CbRayError(f"Ray did not drain node {node_id}: {(asked.stderr or asked.stdout).strip()[-500:]}")


def replicas_under(raylet: psutil.Process) -> Sequence[psutil.Process]:
    """The Serve replicas that run on a node."""
    try:
        children = raylet.children(recursive=True)
    except psutil.NoSuchProcess:
        return ()
    return [child for child in children if _title(child).startswith(REPLICA)]


def wait_for(processes: Sequence[psutil.Process], ends: float) -> Sequence[psutil.Process]:
    """Wait until all are gone or `ends` (`time.monotonic` seconds) has come; returns those that are left. The kernel wakes us."""
    poll, open_fds = select.poll(), dict[int, psutil.Process]()
    try:
        for process in processes:
            try:
                fd = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            open_fds[fd] = process
            poll.register(fd, select.POLLIN)
        gone: set[int] = set()
        while gone < open_fds.keys() and (left_s := ends - time.monotonic()) > 0:
            for fd, _ in poll.poll(left_s * 1000):
                gone.add(fd)
                poll.unregister(fd)
        return [process for fd, process in open_fds.items() if fd not in gone]
    finally:
        for fd in open_fds:
            os.close(fd)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
