"""The processes that the engine starts below this one, and being rid of them.

vLLM cannot be interrupted while it loads, and a killed engine can leave workers behind; this
module makes sure that none outlives the server.
"""

from __future__ import annotations

import psutil

from openengine_vllm import orphan_guard

_TERMINATE_SECONDS = 3.0
_SPARED = ("multiprocessing.resource_tracker", orphan_guard.__file__)


def stop_descendants() -> None:
    """Terminate, then kill, every process below this one. Blocks for some seconds at most.

    Two are spared, because they end with this process: Python's resource tracker, which then
    removes the shared memory that killed children left, and the orphan guard.
    """
    running = _descendants()
    for process in running:
        _signal(process, kill=False)
    _, alive = psutil.wait_procs(running, timeout=_TERMINATE_SECONDS)
    stubborn = {*alive, *_descendants()}
    for process in stubborn:
        _signal(process, kill=True)
    psutil.wait_procs(stubborn, timeout=_TERMINATE_SECONDS)


def _descendants() -> list[psutil.Process]:
    return [
        process for process in psutil.Process().children(recursive=True) if not _is_spared(process)
    ]


def _is_spared(process: psutil.Process) -> bool:
    try:
        return any(name in part for part in process.cmdline() for name in _SPARED)
    except psutil.Error:
        return True


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return
