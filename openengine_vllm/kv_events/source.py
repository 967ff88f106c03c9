"""One rank's publisher: its PUB socket followed, its replay socket asked.

Everything here may go away, come back, fall silent or talk rubbish; what that means is the
feed's to decide.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from openengine_vllm.kv_events.feed import RankFeed
from openengine_vllm.kv_events.receiver import Receiver

_log = structlog.get_logger(__name__)

END = b"\xff" * 8
"""The sequence number that ends a replay."""
_MAX_NUMBER = 2**63 - 1
# Of payload between two turns of the event loop; a message counts as some KiB at least.
_READ_AT_ONCE = 128 * 1024
_READ_PER_MESSAGE = 2 * 1024
_QUEUED_MESSAGES = 10_000
_QUEUED_REPLAYS = 4096
_HEARTBEAT_MS = 5000
_HEARTBEAT_TIMEOUT_MS = 15_000
_RECONNECT_MS = 100
_RECONNECT_MOST_MS = 2000


@dataclass(frozen=True, slots=True)
class Publisher:
    """Where one rank's events come from."""

    rank: int
    """The absolute data-parallel rank."""
    endpoint: str
    """Of the PUB socket, as ZMQ writes it."""
    replay: str | None = None
    """Of the replay socket."""
    topic: str = ""
    """Only messages of this topic; of any, where it is empty."""
    binds: bool = False
    """Whether the publisher connects and we bind."""
    bound: str | None = None
    """What the PUB socket is bound to, where that is not :attr:`endpoint`."""
    bound_replay: str | None = None
    """Likewise of the replay socket."""
    buffer_steps: int | None = None
    """Batches that the replay socket keeps."""
    hwm: int | None = None
    """Batches that may wait for one subscriber."""
    max_queue_size: int | None = None
    """Batches that may wait to be published."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a publisher, in seconds."""

    replay: float = 3.0
    """For the next frame of a replay."""
    replay_whole: float = 60.0
    """For a replay from its start to its end."""
    silence: float = 2.0
    """For the next batch, before the replay socket is asked whether there was one."""


PATIENCE = Patience()
"""With a publisher on the same network."""


class Source:
    """Follows one publisher and feeds what it says to a :class:`RankFeed`.

    Args:
        on_batches: called after batches were put into the feed's log.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        publisher: Publisher,
        feed: RankFeed,
        on_batches: Callable[[], None],
        patience: Patience = PATIENCE,
    ) -> None:
        self._context = context
        self.publisher = publisher
        self.feed = feed
        self._on_batches = on_batches
        self._patience = patience
        self._replay: asyncio.Task[None] | None = None
        self._received = 0
        self._told = 0
        self._stopped = False
        self._receiver: Receiver | None = None
        self._monitor: Receiver | None = None
        self.reached = asyncio.Event()
        """Set once the publisher has been reached."""
        self.connected = False
        """Whether the publisher can be reached at the moment."""

    def open(self) -> None:
        """Connect the socket, so that nothing is missed from now on.

        Raises:
            zmq.ZMQError: the endpoint is not one, or cannot be bound.
        """
        socket = self._context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
            _configure(socket)
            socket.setsockopt(zmq.SUBSCRIBE, self.publisher.topic.encode())
            self._receiver = Receiver(socket)
            self._monitor = Receiver(
                socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            )
            if self.publisher.binds:
                socket.bind(self.publisher.endpoint)
            else:
                socket.connect(self.publisher.endpoint)
        except BaseException:
            self.close()
            socket.close(linger=0)
            raise

    def close(self) -> None:
        """Close the sockets."""
        if self._monitor is not None and self._receiver is not None:
            if not self._receiver.socket.closed:
                self._receiver.socket.disable_monitor()
            self._monitor.close()
        if self._receiver is not None:
            self._receiver.close()

    async def run(self) -> None:
        """Follow the publisher until cancelled; :meth:`open` comes first."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_connection())
                tasks.create_task(self._watch_silence())
                await self._follow()
        finally:
            self._stopped = True
            if self._replay is not None:
                self._replay.cancel()
                await asyncio.gather(self._replay, return_exceptions=True)
            self.close()

    async def _follow(self) -> None:
        assert self._receiver is not None
        receiver = self._receiver
        self._ask_if_wanted()
        while True:
            frames: list[bytes] | None = await receiver.receive()
            size = 0
            while frames is not None:
                self._on_message(frames)
                self._received += 1
                size += _READ_PER_MESSAGE + len(frames[-1])
                frames = receiver.receive_now() if size < _READ_AT_ONCE else None
            self._ask_if_wanted()
            await asyncio.sleep(0)

    def _on_message(self, frames: Sequence[bytes]) -> None:
        topic = self.publisher.topic.encode()
        number = _number(frames[1]) if len(frames) == 3 else None
        if number is None or (topic and frames[0] != topic):
            self.feed.counts.rubbish += 1
            return
        self.feed.live(number, frames[2])

    async def _watch_connection(self) -> None:
        """After each reconnect the last batch is compared with what the publisher has now."""
        assert self._monitor is not None
        while True:
            frames = await self._monitor.receive()
            event = parse_monitor_message(frames)["event"]
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            _log.info(
                "KV event publisher connected"
                if self.connected
                else "KV event publisher disconnected",
                rank=self.publisher.rank,
                endpoint=self.publisher.endpoint,
            )
            if self.connected:
                self.reached.set()
                if self._replay is not None:
                    self._replay.cancel()
                self.feed.check()
                self._ask_if_wanted()

    async def _watch_silence(self) -> None:
        """A batch that is lost before a pause would be missed only after it."""
        while True:
            before = self._received
            await asyncio.sleep(self._patience.silence)
            if self.publisher.replay is not None and self._received == before:
                self.feed.check()
                self._ask_if_wanted()

    def _ask_if_wanted(self) -> None:
        feed = self.feed
        if self.publisher.replay is None:
            while feed.wants is not None:
                feed.asking()
                feed.replay_ended(complete=False)
        self._tell()
        if self.publisher.replay is not None and feed.wants is not None and self._replay is None:
            self._replay = asyncio.ensure_future(self._ask(self.publisher.replay, feed.wants))
            self._replay.add_done_callback(self._replay_done)

    def _tell(self) -> None:
        """Wake the readers if there are batches that they have not been told of."""
        if self._told != self.feed.counts.batches:
            self._told = self.feed.counts.batches
            self._on_batches()

    def _replay_done(self, task: asyncio.Task[None]) -> None:
        self._replay = None
        if self._stopped:
            return
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("KV event replay failed", rank=self.publisher.rank, error=repr(error))
            self.feed.replay_ended(complete=False)
        # One that was cancelled may have brought batches too.
        self._ask_if_wanted()

    async def _ask(self, endpoint: str, start: int) -> None:
        self.feed.asking()
        complete = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience.replay_whole):
                complete = await self._read_replay(endpoint, start)
        self.feed.replay_ended(complete)

    async def _read_replay(self, endpoint: str, start: int) -> bool:
        """Ask for the batches from ``start`` on; returns whether the answer had an end."""
        socket = self._context.socket(zmq.DEALER)
        with Receiver(socket) as receiver:
            socket.setsockopt(zmq.RCVHWM, _QUEUED_REPLAYS)
            _configure(socket)
            socket.connect(endpoint)
            socket.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
            size = 0
            while True:
                frames = receiver.receive_now()
                if frames is None:
                    self._tell()
                    async with asyncio.timeout(self._patience.replay):
                        frames = await receiver.receive()
                if not self._on_replayed(frames):
                    return True
                size += _READ_PER_MESSAGE + len(frames[-1])
                if size >= _READ_AT_ONCE:
                    size = 0
                    self._tell()
                    await asyncio.sleep(0)

    def _on_replayed(self, frames: Sequence[bytes]) -> bool:
        """Take one message of a replay, with or without delimiter and topic; false at the end."""
        if len(frames) >= 2 and frames[-2] == END:
            return False
        number = _number(frames[-2]) if 2 <= len(frames) <= 4 else None
        if number is None:
            self.feed.counts.rubbish += 1
            return True
        self.feed.replayed(number, frames[-1])
        return True


def _number(frame: bytes) -> int | None:
    number = int.from_bytes(frame, "big")
    return number if len(frame) == 8 and number <= _MAX_NUMBER else None


def _configure(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MOST_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
