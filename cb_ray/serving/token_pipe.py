"""Tokens from an engine to a Router over one connection: a message for each step, where Ray's streams take one for each token.

    Engine replica                                              Router
    generate(): outlet.send(channel, chunk) ─┐                 ┌─▶ Channel ─▶ generate()
    generate(): outlet.send(channel, chunk) ─┼─ TCP, one frame ┼─▶ Channel ─▶ generate()
    generate(): outlet.send(channel, chunk) ─┘    a loop turn  └─▶ Channel ─▶ generate()

Owns `PipeInlet` (the Router's end, which listens), `Channel` (one request's chunks, merged while its reader is late), `PipeOutlets`
(an engine's ends, one connection for each Router) and the frames between them. A call still goes through Serve's handle, which
admits it, cancels it and tells when its replica dies; it only says where its tokens shall go. Frames are pickled as Ray pickles its
own messages, and taken only from who knows the inlet's key, which travels in calls. Knows asyncio and the messages; no Ray, no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import pickle
import secrets
import struct
import weakref
from dataclasses import dataclass

from ..errors import ReplicaLostError
from ..messages import TokenChunk, merge_chunks

logger = logging.getLogger("ray.serve")

_HEAD = struct.Struct("!I")  # bytes of the frame that follows
_KEY_BYTES = 32
_MAX_FRAME = 64 * 2**20
_MAX_UNSENT = 2**20  # bytes an outlet holds for a slow Router before its requests wait; their chunks are merged meanwhile
_CONNECT_S = 2.0
_TRY_AGAIN_S = 60.0  # after a Router that could not be reached


@dataclass(frozen=True, slots=True)
class PipeAddress:
    """Where a Router listens. `key` is known to whoever was sent a call by it."""

    host: str
    port: int
    key: bytes


@dataclass(frozen=True, slots=True)
class PipeTicket:
    """Where the tokens of one call shall go."""

    address: PipeAddress
    channel: int


class Channel:
    """The chunks of one call, on the Router's side: put in by a connection or by the call itself, read by one reader."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._chunks: list[TokenChunk] = []
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, chunk: TokenChunk) -> None:
        """One more chunk."""
        self._chunks.append(chunk)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Nothing more will come; the reader is told so after what came before. The first reason stands."""
        self._failure = self._failure or error
        self._wake()

    async def next(self) -> TokenChunk:
        """What came since the last call, as one chunk; waits for it. Raises what `fail` was given, once nothing is left."""
        while not self._chunks:
            if self._failure is not None:
                raise self._failure
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        chunks, self._chunks = self._chunks, []
        return merge_chunks(chunks)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class PipeInlet:
    """A Router's end. It listens from its first use on, on the address at which engines reach this process."""

    def __init__(self, host: str) -> None:
        self._host, self._key = host, secrets.token_bytes(_KEY_BYTES)
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._channels: weakref.WeakValueDictionary[int, Channel] = weakref.WeakValueDictionary()  # as long as somebody reads
        self._numbers = itertools.count(1)
        self._senders: set[asyncio.StreamWriter] = set()

    async def open(self) -> tuple[Channel, PipeTicket]:
        """A channel and the ticket that leads to it. Raises OSError where nothing can be listened on."""
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.start_server(self._receive, self._host, 0, limit=_MAX_UNSENT)
        port = self._server.sockets[0].getsockname()[1]
        channel = Channel(next(self._numbers))
        self._channels[channel.number] = channel
        return channel, PipeTicket(PipeAddress(self._host, port, self._key), channel.number)

    def close(self, channel: Channel) -> None:
        """Nobody reads it any more: what still comes for it is dropped."""
        self._channels.pop(channel.number, None)

    async def aclose(self) -> None:
        """Stop listening and hang up."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._senders):
                await _hang_up(writer)
            await self._server.wait_closed()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One engine's connection, to its end. Its end fails the channels that it was filling."""
        filling: set[int] = set()
        self._senders.add(writer)
        try:
            key = await reader.readexactly(_KEY_BYTES)
            if not hmac.compare_digest(key, self._key):
                logger.warning("a connection to the token pipe came without its key and is refused")
                return
            while True:
                (size,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                if size > _MAX_FRAME:
                    logger.error("a frame of %d bytes in the token pipe is no frame of ours", size)
                    return
                for number, chunk in pickle.loads(await reader.readexactly(size)):
                    channel = self._channels.get(number)
                    if channel is None:
                        continue
                    channel.put(chunk)
                    (filling.discard if chunk.is_terminal else filling.add)(number)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._senders.discard(writer)
            writer.close()
            for number in filling:
                if (channel := self._channels.get(number)) is not None:
                    channel.fail(ReplicaLostError(""))


class Outlet:
    """An engine's end of one connection. What is sent within one turn of the loop goes out as one frame."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._unsent: list[tuple[int, TokenChunk]] = []
        self._loop = asyncio.get_running_loop()

    @property
    def is_lost(self) -> bool:
        """Whether the Router has hung up."""
        return self._writer.transport.is_closing()

    async def send(self, channel: int, chunk: TokenChunk) -> None:
        """Send `chunk`; waits only while the Router is far behind. Raises ReplicaLostError when the Router has hung up."""
        if self.is_lost:
            raise ReplicaLostError("")
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append((channel, chunk))
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT:
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        frame = pickle.dumps(unsent, pickle.HIGHEST_PROTOCOL)
        self._writer.write(_HEAD.pack(len(frame)) + frame)

    async def aclose(self) -> None:
        """Hang up, after what was sent."""
        await _hang_up(self._writer)


class PipeOutlets:
    """An engine's ends: one for each Router that asked it for something, connected when it first does."""

    def __init__(self) -> None:
        self._outlets: dict[PipeAddress, Outlet] = {}
        self._unreachable: dict[PipeAddress, float] = {}  # and when to try again
        self._connecting: dict[PipeAddress, asyncio.Lock] = {}

    async def to(self, address: PipeAddress) -> Outlet | None:
        """The end towards `address`; None where it cannot be reached, which is not tried again for a while."""
        async with self._connecting.setdefault(address, asyncio.Lock()):
            outlet = self._outlets.get(address)
            if outlet is not None and not outlet.is_lost:
                return outlet
            now = asyncio.get_running_loop().time()
            if self._unreachable.get(address, now) > now:
                return None
            self._outlets = {known: outlet for known, outlet in self._outlets.items() if not outlet.is_lost}
            try:
                async with asyncio.timeout(_CONNECT_S):
                    _, writer = await asyncio.open_connection(address.host, address.port)
            except (OSError, TimeoutError) as error:
                self._unreachable[address] = now + _TRY_AGAIN_S
                logger.warning("no token pipe to %s:%d (%s); tokens go through Ray", address.host, address.port, error)
                return None
            writer.write(address.key)
            self._outlets[address] = outlet = Outlet(writer)
            return outlet

    async def aclose(self) -> None:
        """Hang up everywhere."""
        for outlet in self._outlets.values():
            await outlet.aclose()


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
