"""What tox.ini needs of tox beyond its own settings.

Several environments use one folder, because a copy of vLLM takes gigabytes and minutes:
tox by itself rebuilds a folder whenever an environment of another name comes to it. And
SIGTERM ends tox as Ctrl-C does, where it would otherwise leave a served engine behind,
without a parent and holding its port.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from tox.plugin import impl
from tox.tox_env.api import ToxEnv
from tox.tox_env.info import Info
from tox.tox_env.python.virtual_env.runner import VirtualEnvRunner
from tox.tox_env.register import ToxEnvRegister


class _SharedInfo(Info):
    """The record of what a folder holds, without the name of who made it."""

    @contextmanager
    def compare(
        self, value: Any, section: str, sub_section: str | None = None
    ) -> Iterator[tuple[bool, Any | None]]:
        if section == ToxEnv.__name__:
            value = {**value, "name": "shared"}
        with super().compare(value, section, sub_section) as outcome:
            yield outcome


class SharedVirtualEnvRunner(VirtualEnvRunner):
    """A virtual environment that others of the same env_dir and deps may use in turn."""

    @staticmethod
    def id() -> str:
        return "shared-virtualenv"

    @property
    def cache(self) -> Info:
        return _SharedInfo(self.env_dir)


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Pass the signal to the running command, then let tox wait for it as after Ctrl-C."""
    for listing in Path("/proc/self/task").glob("*/children"):
        for child in listing.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(child), signum)
    signal.default_int_handler(signum, frame)


@impl
def tox_register_tox_env(register: ToxEnvRegister) -> None:
    register.add_run_env(SharedVirtualEnvRunner)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
