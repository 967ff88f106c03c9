"""The batches of one rank on ZMQ again, as the contract's messages, with replay as vLLM has it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
import zmq

from openengine_vllm.events import FellBehindError
from openengine_vllm.kv_events import wire
from openengine_vllm.kv_events.endpoints import TcpEndpoint, parse_tcp
from openengine_vllm.kv_events.receiver import Receiver
from openengine_vllm.kv_events.retained import BatchCursor, RetainedBatches
from openengine_vllm.kv_events.source import END

_log = structlog.get_logger(__name__)

HWM = 10_000
"""Batches that may wait for one subscriber; more are dropped, and replayed on request."""
_READ_AT_ONCE = 64
_MAX_REPLAYS = 16
_MAX_REQUEST_BYTES = 64
_REPLAY_HWM = 256
_RETRY_SECONDS = 0.01
_REPLAY_STALL_SECONDS = 10.0


class Republisher:
    """A PUB socket and a ROUTER for replays, for one rank.

    Frames are ``[topic, number as 8 bytes, KvEventBatch]``. A replay is asked for with
    ``[b"", first number as 8 bytes]`` and ends with ``[b"", b"", 8 bytes ff, b""]``; it begins
    with the oldest batch kept where the one asked for is not.

    Args:
        host: address to bind.
        port: of the PUB socket; 0 for a free one.
        replay_port: of the ROUTER; 0 for a free one.

    Raises:
        zmq.ZMQError: an address cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        log: RetainedBatches,
        topic: str,
        host: str,
        port: int,
        replay_port: int,
    ) -> None:
        self._log = log
        self._cursor: BatchCursor = log.cursor()
        self._topic = topic.encode()
        self._replays: set[asyncio.Task[None]] = set()
        self._refuses = False
        self._publisher = context.socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        try:
            self._publisher.setsockopt(zmq.SNDHWM, HWM)
            self._router.setsockopt(zmq.SNDHWM, _REPLAY_HWM)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.endpoint = _bind(self._publisher, host, port)
            """Where the PUB socket is bound."""
            self.replay_endpoint = _bind(self._router, host, replay_port)
            """Where replays are asked for."""
        except BaseException:
            self._publisher.close(linger=0)
            self._router.close(linger=0)
            raise

    def publish(self) -> None:
        """Send what has come into the log since the last time."""
        while True:
            try:
                responses = self._cursor.read(_READ_AT_ONCE)
            except FellBehindError:
                self._cursor.next = self._log.oldest
                continue
            if not responses:
                return
            assert self._cursor.next is not None
            first = self._cursor.next - len(responses)
            for number, response in enumerate(responses, first):
                frames = (self._topic, number.to_bytes(8, "big"), wire.batch_of(response))
                self._publisher.send_multipart(frames, zmq.NOBLOCK)

    async def serve_replays(self) -> None:
        """Answer replay requests until cancelled."""
        with Receiver(self._router) as receiver:
            try:
                while True:
                    self._on_request(await receiver.receive())
            finally:
                for replay in self._replays:
                    replay.cancel()

    def close(self) -> None:
        """Close the sockets; what has been sent may still leave for a moment."""
        self._publisher.close(linger=200)
        if not self._router.closed:
            self._router.close(linger=0)

    def _on_request(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or frames[1] or not 0 < len(frames[2]) <= 8:
            _log.debug("not a replay request", frames=len(frames))
            return
        if len(self._replays) >= _MAX_REPLAYS:
            if not self._refuses:
                _log.warning("too many replays at once")
            self._refuses = True
            return
        self._refuses = False
        client, _, start = frames
        replay = asyncio.ensure_future(self._replay(client, int.from_bytes(start, "big")))
        self._replays.add(replay)
        replay.add_done_callback(self._replays.discard)

    async def _replay(self, client: bytes, start: int) -> None:
        """Send what is kept from ``start`` on, as of now, and the end."""
        number, stop = start, self._log.next
        while (number := max(number, self._log.oldest)) < stop:
            [response] = self._log.read(number, 1)
            frames = (
                client,
                b"",
                self._topic,
                number.to_bytes(8, "big"),
                wire.batch_of(response),
            )
            if not await self._send(frames):
                return
            number += 1
            if number % _READ_AT_ONCE == 0:
                await asyncio.sleep(0)
        await self._send((client, b"", b"", END, b""))

    async def _send(self, frames: Sequence[bytes]) -> bool:
        """Send to a client that reads; false when it has gone, or does not."""
        for _ in range(int(_REPLAY_STALL_SECONDS / _RETRY_SECONDS)):
            try:
                self._router.send_multipart(frames, zmq.NOBLOCK)
                return True
            except zmq.Again:
                await asyncio.sleep(_RETRY_SECONDS)
            except zmq.ZMQError:
                return False
        return False


def _bind(socket: zmq.Socket[bytes], host: str, port: int) -> TcpEndpoint:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
    socket.bind(str(TcpEndpoint(host, port)))
    bound = parse_tcp(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    assert bound is not None
    return TcpEndpoint(host, bound.port)
