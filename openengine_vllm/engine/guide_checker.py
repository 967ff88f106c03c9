"""Has guides compiled in a process of their own, so that a hostile one can stall nothing here.

A guide's compilation can take any time and any memory, or crash, and cannot be interrupted.
The engine compiles each guide again and has no limits; only guides that compiled within them
here get that far.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import structlog

from openengine_vllm import limits
from openengine_vllm.engine.checks import rejected, unsupported
from openengine_vllm.engine.guided import Guide
from openengine_vllm.protocol import errors

_log = structlog.get_logger(__name__)

_WORKER = "openengine_vllm.engine.guide_worker"
_FIELDS = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
    "choice": "choice",
    "json_object": "json_object",
}
"""Fields of GuidedDecoding and of vLLM's StructuredOutputsParams."""


@dataclass(frozen=True, slots=True)
class CheckedGuide:
    """A guide that compiled, as vLLM takes it."""

    constraint: Mapping[str, Any]
    """One argument of vLLM's StructuredOutputsParams."""
    backend: str
    backend_was_auto: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the worker found; short enough to be remembered."""

    outcome: str
    """`ok`, `rejected`, `unsupported` or `busy`."""
    reason: str = ""
    backend: str = ""
    backend_was_auto: bool = False
    rewritten: Mapping[str, Any] | None = None
    """The constraint where the backend wants it in another form."""


class GuideChecker:
    """The worker process and what it has found so far. Used from one event loop.

    The worker is started at once, restarted when it dies, and ends with this process however
    that ends. Guides are compiled one after the other; each new one costs the processor time
    of its compilation, one seen before nothing.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guides")
        self._lock = threading.Lock()
        self._closed = False
        self._config = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Connection | None = None
        self._verdicts: OrderedDict[str, Verdict] = OrderedDict()
        self._running: dict[str, asyncio.Future[Verdict]] = {}
        self._start()

    def configure(self, config: bytes) -> None:
        """Hand the worker the pickled configuration of the engine; due before any check."""
        self._config = config
        self._thread.submit(self._send_config)

    async def check(self, guide: Guide) -> CheckedGuide:
        """The guide in vLLM's terms, once it has compiled.

        Raises:
            OpenEngineError: it does not compile, or takes more than the limits; there are too
                many before it; the backend cannot work with the model's tokenizer.
        """
        key = _key(guide)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await asyncio.shield(self._running.get(key) or self._begin(key, guide))
        else:
            self._verdicts.move_to_end(key)
        if verdict.outcome == "rejected":
            raise rejected(guide.field_path, verdict.reason)
        if verdict.outcome == "unsupported":
            raise unsupported("guided", verdict.reason)
        if verdict.outcome != "ok":
            raise errors.overloaded(verdict.reason)
        constraint = verdict.rewritten or {_FIELDS[guide.kind]: _plain(guide)}
        return CheckedGuide(constraint, verdict.backend, verdict.backend_was_auto)

    def close(self) -> None:
        """End the worker. Checks under way fail as overload."""
        with self._lock:
            self._closed = True
            self._end()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, key: str, guide: Guide) -> asyncio.Future[Verdict]:
        if len(self._running) >= limits.MAX_WAITING_GUIDES:
            raise errors.overloaded(
                f"{limits.MAX_WAITING_GUIDES} guides wait to be compiled already"
            )
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._thread, self._ask, guide)
        self._running[key] = running
        running.add_done_callback(lambda done: self._settle(key, done))
        return running

    def _settle(self, key: str, done: asyncio.Future[Verdict]) -> None:
        del self._running[key]
        if done.cancelled() or done.exception() is not None or done.result().outcome == "busy":
            return
        self._verdicts[key] = done.result()
        if len(self._verdicts) > limits.MAX_REMEMBERED_GUIDES:
            self._verdicts.popitem(last=False)

    def _ask(self, guide: Guide) -> Verdict:
        """Have the worker compile a guide. Blocks; runs in the one thread.

        A worker that has died is replaced once; guides do not kill it, only its children.
        """
        message = json.dumps({"constraint": {_FIELDS[guide.kind]: _plain(guide)}}).encode()
        for _ in range(2):
            if not self._ensure_started():
                break
            link = self._link
            try:
                if link is not None:
                    link.send_bytes(message)
                    return Verdict(**json.loads(link.recv_bytes()))
            except (EOFError, OSError):
                with self._lock:
                    if not self._closed:
                        _log.error("the process that compiles guides has died")
                    self._end()
        return _STOPPED

    def _ensure_started(self) -> bool:
        """Whether there is a worker, now; false once closed."""
        with self._lock:
            if self._closed:
                return False
            if self._link is not None:
                return True
            self._start()
        self._send_config()
        return True

    def _send_config(self) -> None:
        link = self._link
        if link is not None:
            with contextlib.suppress(OSError):
                link.send_bytes(self._config)

    def _start(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            # A group of its own, so that a Ctrl-C in the terminal does not end it before the
            # drain. Not a session: Linux would then give it as much of the processor as all
            # of the engine, however low its priority.
            self._process = subprocess.Popen(
                [sys.executable, "-m", _WORKER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        self._link = ours

    def _end(self) -> None:
        process, self._process, self._link = self._process, None, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


_STOPPED = Verdict("busy", "the process that compiles guides has stopped; try again")


def _plain(guide: Guide) -> Any:
    return list(guide.value) if isinstance(guide.value, tuple) else guide.value


def _key(guide: Guide) -> str:
    text = json.dumps([guide.kind, guide.value])
    return hashlib.sha256(text.encode()).hexdigest()
