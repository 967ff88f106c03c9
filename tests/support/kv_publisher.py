"""A publisher of KV events as vLLM has one, whose every message the test decides."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import zmq

from openengine_vllm.kv_events.receiver import Receiver
from openengine_vllm.kv_events.source import END, Publisher
from tests.support.kv_messages import payload


class ScriptedPublisher:
    """PUB and replay sockets on loopback ports, in the test's event loop.

    Args:
        rank: named in the batches.
        buffer: batches that the replay socket keeps.
        ports: to bind again, after a restart.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        rank: int = 0,
        *,
        buffer: int = 10_000,
        topic: str = "",
        ports: tuple[int, int] = (0, 0),
    ) -> None:
        self.rank = rank
        self.topic = topic
        self.buffer = buffer
        self.next = 0
        self.sent: dict[int, bytes] = {}
        self.silent = False
        """Whether replay requests are left unanswered."""
        self.never_ends = False
        """Whether replays lack their end."""
        self.bare_frames = False
        """Whether replayed batches come without delimiter and topic."""
        self.replays: list[int] = []
        """The numbers that were asked for."""
        self._publisher = context.socket(zmq.XPUB)
        self._publisher.setsockopt(zmq.SNDHWM, 0)
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self.ports = (_bind(self._publisher, ports[0]), _bind(self._router, ports[1]))
        self._subscriptions = Receiver(self._publisher)
        self._requests = Receiver(self._router)
        self._serving = asyncio.ensure_future(self._serve())

    def described(self, rank: int | None = None, *, replay: bool = True) -> Publisher:
        """As the bridge is told of it."""
        return Publisher(
            self.rank if rank is None else rank,
            f"tcp://127.0.0.1:{self.ports[0]}",
            f"tcp://127.0.0.1:{self.ports[1]}" if replay else None,
            self.topic,
        )

    async def subscribed(self) -> None:
        """Wait for the next subscription."""
        async with asyncio.timeout(20):
            while (await self._subscriptions.receive())[0][:1] != b"\x01":
                pass

    def make(self, *events: Any) -> tuple[int, bytes]:
        """The next batch, kept for replays but not sent."""
        number, self.next = self.next, self.next + 1
        data = payload(*events, ts=1.7e9 + number / 1000, rank=self.rank)
        self.sent[number] = data
        self.sent.pop(number - self.buffer, None)
        return number, data

    def publish(self, *events: Any) -> int:
        """The next batch, sent; returns its number."""
        number, data = self.make(*events)
        self.send(number, data)
        return number

    def send(self, number: int, data: bytes) -> None:
        """Any bytes under any number."""
        self.send_frames(self.topic.encode(), number.to_bytes(8, "big"), data)

    def send_frames(self, *frames: bytes) -> None:
        """Any message."""
        self._publisher.send_multipart(frames)

    def close(self) -> None:
        """Go away."""
        self._serving.cancel()
        self._subscriptions.close()
        self._requests.close()

    async def _serve(self) -> None:
        while True:
            client, *_, start = await self._requests.receive()
            first = int.from_bytes(start, "big")
            self.replays.append(first)
            if self.silent:
                continue
            for number in sorted(self.sent):
                if number >= first:
                    self._reply(client, number.to_bytes(8, "big"), self.sent[number])
                    await asyncio.sleep(0)
            if not self.never_ends:
                self._reply(client, END, b"")

    def _reply(self, client: bytes, number: bytes, data: bytes) -> None:
        front: Sequence[bytes] = () if self.bare_frames else (b"", self.topic.encode())
        self._router.send_multipart((client, *front, number, data))


def _bind(socket: zmq.Socket[bytes], port: int) -> int:
    socket.setsockopt(zmq.LINGER, 0)
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.bind(f"tcp://127.0.0.1:{port or '*'}")
            break
        except zmq.ZMQError as error:
            # ZMQ closes a socket in the background.
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


@contextlib.asynccontextmanager
async def publishers(count: int = 1, **settings: Any) -> AsyncIterator[list[ScriptedPublisher]]:
    """Publishers of the first ranks; the list may be changed and is closed at the end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[ScriptedPublisher] = []
    try:
        for rank in range(count):
            made.append(ScriptedPublisher(context, rank, **settings))
        yield made
    finally:
        for publisher in made:
            publisher.close()
        context.destroy(linger=0)
