"""Python programs that start warm: forked from a process that has imported vLLM already.

On a small machine the imports of an engine's processes are nearly all of its start. Here a process
without threads makes them once and is forked in place of each new interpreter: for a server under
test, and again for the processes that vLLM spawns from it. A forked program gets the arguments,
the environment, the files, the signal mask, the process group and the parent of the one that it
stands for. What it has not is an environment and a command line of its own in `/proc`; tests of
how processes are started and found use plain ones.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import util
from typing import Any, Final, NoReturn

import setproctitle

from tests.support.environment import server_environment

_MODULES: Final = (
    "openengine_vllm.loading",
    "openengine_vllm.process",
    "openengine_vllm.engine.http",
    "openengine_vllm.engine.guide_worker",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.structured_output.backend_xgrammar",
    "vllm.v1.worker.cpu_worker",
)
_READ_AT_IMPORT: Final = ("HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PYTHONHASHSEED")
"""Variables for which it is too late in a process that has its imports behind it."""
_ENVIRONMENT: Final = 6
"""Its place among the arguments of `Popen._execute_child`."""
_FORK: Final = "--multiprocessing-fork"
"""The last argument of whatever Python's multiprocessing spawns."""
_MOST_BYTES: Final = 256 * 1024
_MOST_FILES: Final = 64
_PR_SET_CHILD_SUBREAPER: Final = 36


class WarmPopen(subprocess.Popen[str]):
    """A `subprocess.Popen` of `python -m MODULE` that starts warm where it can."""

    def _execute_child(self, *details: Any) -> None:
        if _fits(details[_ENVIRONMENT]):
            _execute(_nursery(), self, *details)
        else:
            super()._execute_child(*details)  # type: ignore[misc]


def _execute(
    nursery: Nursery,
    process: Any,
    args: Sequence[str],
    executable: None,
    preexec_fn: None,
    close_fds: bool,
    pass_fds: Sequence[int],
    cwd: None,
    env: Mapping[str, str] | None,
    startupinfo: None,
    creationflags: int,
    shell: bool,
    p2cread: int,
    p2cwrite: int,
    c2pread: int,
    c2pwrite: int,
    errread: int,
    errwrite: int,
    restore_signals: bool,
    gid: None,
    gids: None,
    uid: None,
    umask: int,
    start_new_session: bool,
    process_group: int,
) -> None:
    """Stands for the method of `Popen` that forks and executes; all its others stay."""
    streams = {0: p2cread, 1: c2pwrite, 2: errwrite}
    files = {number: number if file == -1 else file for number, file in streams.items()}
    group = -1 if start_new_session else None if process_group == -1 else process_group
    process.pid = nursery.fork([*args[1:]], files | {n: n for n in pass_fds}, env, group)
    process._child_created = True
    process._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _fits(environment: Mapping[str, str]) -> bool:
    """Whether a program with this environment can start from what is imported with ours.

    Where numpy may have several threads it has them from its import on, and nothing can.
    """
    own = server_environment()
    return own.get("OMP_NUM_THREADS") == "1" and all(
        environment.get(name) == own.get(name) for name in _READ_AT_IMPORT
    )


class Nursery:
    """The connection to a process that is forked for each new program.

    It belongs to one process, which becomes the parent of all that it forks.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def fork(
        self,
        arguments: list[str],
        files: Mapping[int, int],
        environment: Mapping[str, str] | None,
        process_group: int | None,
    ) -> int:
        """Start a program as a child of this process.

        Args:
            arguments: what follows the interpreter: `-m MODULE`, or what
                :func:`multiprocessing.spawn.get_command_line` makes of it.
            files: the program's file numbers, and ours in their places.
            process_group: 0 for one of its own, -1 for a session of its own.

        Returns:
            Its process id.
        """
        order = {
            "arguments": arguments,
            "files": list(files),
            "environment": dict(os.environ if environment is None else environment),
            "folder": os.getcwd(),
            "process_group": process_group,
            "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        }
        with self._lock:
            data = json.dumps(order).encode()
            assert len(data) < _MOST_BYTES
            # Only for this, or orphans of a killed engine would stay below a server that has
            # to find and kill them.
            _adopt(orphans=True)
            try:
                socket.send_fds(self._connection, [data], list(files.values()))
                answer = self._connection.recv(64)
            finally:
                _adopt(orphans=False)
        return int(answer)


def _nursery() -> Nursery:
    """This process's own. A server in this process has killed all below it when it stops."""
    process, nursery = _started()
    if process.poll() is not None:
        _started.cache_clear()
        _, nursery = _started()
    return nursery


@functools.cache
def _started() -> tuple[subprocess.Popen[bytes], Nursery]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=server_environment(),
            process_group=0,
        )
    return process, Nursery(ours)


def _adopt(*, orphans: bool) -> None:
    """Become the parent of orphans below this process, or leave them to init as usual."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(connection: socket.socket) -> None:
    """Fork for each order, until nobody can send any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        data, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_FILES)
        if not data:
            os._exit(0)
        reading, writing = os.pipe()
        middle = os.fork()
        if not middle:
            # This one ends at once, so that the program becomes the asking process's child.
            middle = os.getpid()
            child = os.fork()
            if child:
                os.write(writing, str(child).encode())
                os._exit(0)
            while os.getppid() == middle:
                time.sleep(0.001)
            _begin(json.loads(data), files)
        os.waitpid(middle, 0)
        os.close(writing)
        answer = os.read(reading, 64)
        os.close(reading)
        for file in files:
            os.close(file)
        connection.send(answer)


def _begin(order: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """Become the program; in a new process."""
    group = order["process_group"]
    if group == -1:
        os.setsid()
    elif group is not None:
        os.setpgid(0, group)
    os.chdir(order["folder"])
    _take(order["files"], files)
    os.environ.clear()
    os.environ.update(order["environment"])
    more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in more if path and path not in sys.path]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, order["mask"])
    _log_at(os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))
    arguments = order["arguments"]
    setproctitle.setproctitle(" ".join((sys.executable, *arguments)))
    _start_children_warm()
    if _FORK in arguments:
        call = arguments[arguments.index("-c") + 1]
        sys.argv = ["-c", _FORK]
        _run(lambda: exec(call, {}))
    first = arguments.index("-m") + 1
    module = arguments[first]
    sys.argv = arguments[first:]
    sys.modules.pop(module, None)  # or a warning would be printed
    _run(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


def _log_at(level: str) -> None:
    vllm = logging.getLogger("vllm")
    vllm.setLevel(level)
    for handler in vllm.handlers:
        handler.setLevel(level)


def _run(program: Any) -> NoReturn:
    """As the interpreter would, and with its exit status."""
    status: object = 0
    try:
        program()
    except SystemExit as end:
        status = end.code
    except BaseException:  # as the interpreter does with whatever nobody caught
        sys.excepthook(*sys.exc_info())
        status = 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = 120
    os._exit(status or 0)


def _take(numbers: Sequence[int], files: Sequence[int]) -> None:
    """Have these files under these numbers, and no others."""
    high = max((2, *numbers, *files)) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, high) for file in files]
    for number, file in zip(numbers, moved, strict=True):
        os.dup2(file, number)
    kept = {0, 1, 2, *numbers}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


@contextlib.contextmanager
def warm_children() -> Iterator[None]:
    """Have the processes that vLLM spawns from this one start warm for a while."""
    cold = util.spawnv_passfds
    if _fits(server_environment()):
        _take_children_from(_nursery())
    try:
        yield
    finally:
        util.spawnv_passfds = cold


def _start_children_warm() -> None:
    """Fork a nursery for this process's own children, and have vLLM's come from there."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        os.closerange(0, theirs.fileno())
        os.closerange(theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        for _ in range(3):
            os.open(os.devnull, os.O_RDWR)
        setproctitle.setproctitle("nursery")
        _serve(theirs)
    theirs.close()
    nursery = Nursery(ours)
    _take_children_from(nursery)
    execute_cold: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute(process: Any, args: Any, *details: Any) -> None:
        if tuple(args[:2]) == (sys.executable, "-m") and args[2] in _MODULES:
            _execute(nursery, process, args, *details)
        else:
            execute_cold(process, args, *details)

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def _take_children_from(nursery: Nursery) -> None:
    spawn_cold: Any = util.spawnv_passfds

    def spawn(path: Any, args: Sequence[str | bytes], files: Sequence[int]) -> Any:
        arguments = [os.fsdecode(arg) for arg in args[1:]]
        if _FORK not in arguments:
            return spawn_cold(path, args, files)
        return nursery.fork(arguments, {number: number for number in (0, 1, 2, *files)}, None, None)

    util.spawnv_passfds = spawn  # type: ignore[assignment]


def main() -> NoReturn:
    """Import, then serve on the socket of this number."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    setproctitle.getproctitle()  # it finds its place only as long as the environment is untouched
    for name in _MODULES:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack its threads"
    gc.collect()
    gc.freeze()
    _serve(connection)
    raise AssertionError


if __name__ == "__main__":
    main()
