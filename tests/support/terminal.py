"""A program in a terminal of real size, and what a person would see there."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pyte

from tests.support.calls import PATIENCE_SECONDS

COLUMNS, LINES = 110, 34

# Questions and settings of terminals later than pyte, which would print a part of them.
_UNKNOWN = re.compile(rb"\x1b\[[<>=?]?[0-9;]*(?:\$p|u)|\x1b\[[<>=][0-9;]*[a-zA-Z]")
_ON = re.compile(rb"\x1b\[\?([0-9;]+)h")
_OFF = re.compile(rb"\x1b\[\?([0-9;]+)l")
_ON_BY_DEFAULT = {b"7", b"25"}
"""Lines that wrap, and the cursor."""


class Terminal:
    """``python -m openengine_vllm`` with these arguments, as `terminal` starts it."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, slave: int) -> None:
        self.process = process
        self.output = b""
        """All bytes so far."""
        self._master, self._slave = master, slave
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self._screen)
        self._changed = asyncio.Event()

    @property
    def lines(self) -> list[str]:
        """What the screen shows."""
        return [line.rstrip() for line in self._screen.display]

    def press(self, keys: str) -> None:
        """Types."""
        os.write(self._master, keys.encode())

    async def until(self, condition: Callable[[str], Any]) -> str:
        """Waits until the screen's text meets a condition, and returns it.

        Raises:
            AssertionError: it took too long, or the program has ended.
        """
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not condition(text := "\n".join(self.lines)):
                    assert self.process.poll() is None, self.output[-2000:]
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), 1)
        except TimeoutError:
            raise AssertionError("\n".join(self.lines)) from None
        return text

    async def end(self) -> int:
        """Waits for the program's end, and returns its exit code."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await asyncio.to_thread(self.process.wait)

    def modes_left(self) -> set[bytes]:
        """The modes that are not what they were before the program."""
        on = set(_ON_BY_DEFAULT)
        for match in re.finditer(_ON.pattern + b"|" + _OFF.pattern, self.output):
            if match[1] is not None:
                on |= set(match[1].split(b";"))
            else:
                on -= set(match[2].split(b";"))
        return on ^ _ON_BY_DEFAULT

    def settings(self) -> list[Any]:
        """The line discipline's."""
        return termios.tcgetattr(self._slave)

    def read(self) -> None:
        """Takes what the program has written."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._master, 65536)
            self.output += data
            self._stream.feed(_UNKNOWN.sub(b"", data))
            self._changed.set()


@contextlib.asynccontextmanager
async def terminal(*arguments: str) -> AsyncIterator[Terminal]:
    """A program that runs in a terminal, and is gone when the context ends."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    os.set_blocking(master, False)
    process = _start(arguments, slave)
    shown = Terminal(process, master, slave)
    loop = asyncio.get_running_loop()
    loop.add_reader(master, shown.read)
    try:
        yield shown
    finally:
        process.kill()
        process.wait()
        loop.remove_reader(master)
        os.close(master)
        os.close(slave)


def _start(arguments: Sequence[str], slave: int) -> subprocess.Popen[bytes]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("COLUMNS", "LINES", "NO_COLOR") and not key.startswith("OPENENGINE_")
    }
    return subprocess.Popen(
        [sys.executable, "-m", "openengine_vllm", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**kept, "TERM": "xterm-256color", "PYTHONUTF8": "1"},
        process_group=0,
    )
