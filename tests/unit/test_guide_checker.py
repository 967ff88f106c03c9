"""The process that compiles guides, with the tiny model's tokenizer and no engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.structured_output.request import StructuredOutputRequest, get_structured_output_key

from openengine_vllm import limits
from openengine_vllm.engine.guide_checker import CheckedGuide, GuideChecker
from openengine_vllm.engine.guide_params import CheckedSamplingParams, guide_params, worker_config
from openengine_vllm.engine.guide_worker import forges_lines
from openengine_vllm.engine.guided import Guide
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import OpenEngineError
from tests.support.models import model_dir

# The worker imports vLLM first; each test process would have one of its own.
pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("guides")]

EXPONENTIAL = "\n".join(
    ["root ::= r0", *(f'r{i} ::= r{i + 1} r{i + 1} | "a"' for i in range(2000)), 'r2000 ::= "b"']
)


@pytest.fixture(scope="module")
def config() -> bytes:
    model = str(model_dir("tiny_llama"))
    return worker_config(EngineArgs(model=model, enforce_eager=True).create_engine_config())


@pytest.fixture(scope="module")
def shared(config: bytes) -> Iterator[GuideChecker]:
    checker = GuideChecker()
    checker.configure(config)
    yield checker
    checker.close()


async def refused(checker: GuideChecker, kind: str, value: str) -> OpenEngineError:
    with pytest.raises(OpenEngineError) as caught:
        await checker.check(Guide(kind, value))
    return caught.value


async def test_good_guides_come_back_in_vllms_terms(shared: GuideChecker) -> None:
    assert await shared.check(Guide("regex", "a+")) == CheckedGuide(
        {"regex": "a+"}, "xgrammar", True
    )
    checked = await shared.check(Guide("choice", ("yes", "no")))
    assert set(checked.constraint) == {"grammar"}
    assert (await shared.check(Guide("json_object", True))).constraint == {"json_object": True}


async def test_bad_guide_is_refused_with_the_compilers_reason(shared: GuideChecker) -> None:
    error = await refused(shared, "regex", "(")
    assert error.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert error.field == "guided.regex"
    assert error.message.startswith("guided.regex does not compile: Regex parsing error")


async def test_hostile_guide_ends_at_the_limit_and_the_next_is_compiled(
    shared: GuideChecker,
) -> None:
    error = await refused(shared, "ebnf_grammar", EXPONENTIAL)
    assert f"more than {limits.GUIDE_CPU_SECONDS:g} s" in error.message
    assert (await shared.check(Guide("regex", "b"))).constraint == {"regex": "b"}


async def test_guide_that_slows_down_with_every_token_is_refused(shared: GuideChecker) -> None:
    error = await refused(shared, "regex", "(((a{1,100}){1,100}){1,100}){1,100}")
    assert f"more than {limits.GUIDE_STEP_SECONDS:g} s for one token" in error.message
    assert (await shared.check(Guide("regex", "(ab?){1,100}"))).backend == "xgrammar"


async def test_same_guide_is_compiled_once(shared: GuideChecker) -> None:
    first = [shared.check(Guide("regex", "same")) for _ in range(3)]
    assert len(set(map(str, await asyncio.gather(*first)))) == 1
    process = shared._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        assert (await shared.check(Guide("regex", "same"))).constraint == {"regex": "same"}
    finally:
        os.kill(process.pid, signal.SIGCONT)


async def test_too_many_waiting_are_turned_away(shared: GuideChecker) -> None:
    process = shared._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        waiting = [
            asyncio.ensure_future(shared.check(Guide("regex", f"w{i}")))
            for i in range(limits.MAX_WAITING_GUIDES)
        ]
        await asyncio.sleep(0)
        error = await refused(shared, "regex", "one more")
        assert error.code == pb.ERROR_CODE_OVERLOADED
        assert error.retryable
        assert not any(task.done() for task in waiting)
        gone = waiting.pop()
        gone.cancel()
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert len(await asyncio.gather(*waiting)) == limits.MAX_WAITING_GUIDES - 1


async def test_dead_worker_is_replaced(shared: GuideChecker) -> None:
    process = shared._process
    assert process is not None
    process.kill()
    process.wait()
    assert (await shared.check(Guide("regex", "after death"))).backend == "xgrammar"


async def test_closed_checker_fails_what_it_is_asked(config: bytes) -> None:
    checker = GuideChecker()
    checker.configure(config)
    process = checker._process
    assert process is not None
    waiting = asyncio.ensure_future(checker.check(Guide("regex", "a")))
    await asyncio.sleep(0)
    checker.close()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises((OpenEngineError, asyncio.CancelledError)):
        await waiting


async def test_params_skip_only_the_guides_validation_and_travel(shared: GuideChecker) -> None:
    checked = await shared.check(Guide("choice", ("yes", "no")))
    params: Any = CheckedSamplingParams(structured_outputs=guide_params(checked), skip_clone=True)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert decoded.structured_outputs is not None
    assert decoded.structured_outputs._backend == "xgrammar"
    assert decoded.structured_outputs._backend_was_auto
    request = StructuredOutputRequest.from_sampling_params(decoded)
    assert request is not None
    assert get_structured_output_key(request.params)[1].startswith("root ::=")


_OWNER = """
import sys, time
from openengine_vllm.engine.guide_checker import GuideChecker
print(GuideChecker()._process.pid, flush=True)
time.sleep(600)
"""


def test_worker_ends_with_its_owner_and_not_with_ctrl_c() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True, process_group=0
    ) as owner:
        assert owner.stdout is not None
        worker = psutil.Process(int(owner.stdout.readline()))
        assert os.getpgid(worker.pid) == worker.pid != owner.pid
        owner.kill()
        owner.wait()
    psutil.wait_procs([worker], timeout=120)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("warnings", "forged"),
    [
        (b"", False),
        (b"[03:39:07] /x.cc:1499: Warning: oneOf is treated as anyOf\n", False),
        (b"[03:39:07] /x.cc:1: a\n[03:39:08] /x.cc:2: b\n", False),
        (b"[03:39:07] /x.cc:1: got http://x\nlevel=error event=forged\n", True),
        (b"[03:39:07] /x.cc:1: got \x1b[31m\n", True),
        (b"[03:39:07] /x.cc:1: got a\rlevel=error\n", True),
        (b"[03:39:07] /x.cc:1: got \xff\n", False),
    ],
)
def test_warnings_that_forge_lines(warnings: bytes, forged: bool) -> None:
    assert forges_lines(warnings) == forged
