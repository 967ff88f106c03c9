"""Being rid of every process below this one, with real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, pathlib, signal, subprocess, sys, time
from multiprocessing import resource_tracker
import psutil
from openengine_vllm.children import stop_descendants
from openengine_vllm.orphan_guard import OrphanGuard

def start(code):
    process = subprocess.Popen([sys.executable, "-c", code + "\\nprint('up', flush=True)\\n"
        "time.sleep(600)"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\\n"
    return process

def command(process):
    return " ".join(process.cmdline())

with OrphanGuard(pathlib.Path(sys.argv[1])):
    resource_tracker.ensure_running()
    spared = psutil.Process().children()
    assert len(spared) == 2, spared
    {setup}
    stop_descendants()
    left = [child for child in psutil.Process().children(recursive=True)
            if child.status() != psutil.STATUS_ZOMBIE]
    assert sorted(p.pid for p in left) == sorted(p.pid for p in spared), list(map(command, left))
print("done")
"""

PLAIN = """
    processes = [start("import time") for _ in range(2)]
"""
DEAF = """
    processes = [start("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)")]
"""
GRANDCHILD = """
    inner = [sys.executable, "-c", "import time; time.sleep(600)"]
    start("import subprocess, time; subprocess.Popen(" + repr(inner) + ")")
"""
BREEDING = """
    # On SIGTERM it starts another process and stays: that one has to go as well.
    code = '''
import signal, subprocess, sys, time
def breed(*_):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGTERM, breed)
'''
    start(code)
"""
STOPPED = """
    process = start("import time")
    os.kill(process.pid, signal.SIGSTOP)
"""


@pytest.mark.parametrize(
    "setup",
    [PLAIN, DEAF, GRANDCHILD, BREEDING, STOPPED, "pass"],
    ids=["plain", "deaf", "grandchild", "breeding", "stopped", "none"],
)
def test_nothing_is_left_but_what_ends_by_itself(setup: str, tmp_path: Path) -> None:
    code = PROGRAM.replace("{setup}", setup.strip())
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "scratch")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.stderr == ""
    assert done.stdout == "done\n"
