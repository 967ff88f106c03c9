"""The process that compiles guides: imports vLLM once, then forks for each guide.

A guide is compiled as the engine will compile it, with the model's tokenizer and the engine's
backend, in a child that the kernel ends at the limits of time and memory. Nothing of it stays
behind, so the next guide finds the process as it was.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import signal
import sys
import threading
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output.request import get_structured_output_key

from openengine_vllm import limits
from openengine_vllm.engine.guide_checker import Verdict
from openengine_vllm.engine.guided import short_reason

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.structured_output.backend_types import (
        StructuredOutputBackend,
        StructuredOutputGrammar,
    )

_MOST_WARNING_BYTES = 64 * 1024
_WARNING = re.compile(r"\[\d\d:\d\d:\d\d\] ")
"""How a line of xgrammar's begins."""
_NICENESS = 10
_STACK_BYTES = 4 * limits.MIB
"""Half of what the engine's threads have: what does not overflow here does not there."""

_AUTO_BACKEND: Final = "xgrammar"
"""vLLM's engine keeps the backend of the first guide that it is given, whatever later ones
name. So with `auto`, which would choose anew for each guide, all guides get the same one."""


class TooSlow(Exception):
    """A guide that would hold up the engine at each token."""


class Compiler:
    """The engine's backend with the model's tokenizer.

    Raises:
        Exception: the backend cannot work with the tokenizer.
    """

    def __init__(self, config: VllmConfig) -> None:
        outputs = config.structured_outputs_config
        self._was_auto = outputs.backend == "auto"
        if self._was_auto:
            outputs.backend = _AUTO_BACKEND
        self._config = config
        self._tokenizer = cached_tokenizer_from_config(model_config=config.model_config)
        self._backend = _backend(config, self._tokenizer)

    def compile(self, constraint: dict[str, Any]) -> Verdict:
        """Validate and compile one guide, and follow it for some tokens.

        Raises:
            TooSlow: a token takes too long to find.
            Exception: whatever the compiler says is wrong with the guide.
        """
        outputs = StructuredOutputsParams(**constraint)
        outputs_config = self._config.structured_outputs_config
        SamplingParams(structured_outputs=outputs).verify(
            self._config.model_config, None, outputs_config, self._tokenizer
        )
        grammar = self._backend.compile_grammar(*get_structured_output_key(outputs))
        matcher = getattr(grammar, "ll_matcher", None)
        if matcher is not None and (error := matcher.get_error()):
            raise ValueError(error)
        self._rehearse(grammar)
        return Verdict(
            "ok",
            backend=outputs_config.backend,
            backend_was_auto=self._was_auto,
            rewritten=_rewritten(outputs, constraint),
        )

    def _rehearse(self, grammar: StructuredOutputGrammar) -> None:
        """Do what the engine does between two steps of all its requests, and time it.

        Ambiguous guides compile at once and then take longer with every token.
        """
        mask = self._backend.allocate_token_bitmask(1)
        for step in range(limits.GUIDE_REHEARSAL_TOKENS):
            started = time.process_time()
            mask.fill_(0)
            grammar.fill_bitmask(mask, 0)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            if not step and not len(allowed):
                raise ValueError("no text matches it")
            ids = allowed[allowed != self._tokenizer.eos_token_id]
            if not len(ids) or not grammar.accept_tokens("", [int(ids[0])]):
                return
            if time.process_time() - started > limits.GUIDE_STEP_SECONDS:
                raise TooSlow


def _backend(config: VllmConfig, tokenizer: Any) -> StructuredOutputBackend:
    options = {"tokenizer": tokenizer, "vocab_size": config.model_config.get_vocab_size()}
    name = config.structured_outputs_config.backend
    if name == "xgrammar":
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        return XgrammarBackend(config, **options)
    if name == "guidance":
        from vllm.v1.structured_output.backend_guidance import GuidanceBackend

        return GuidanceBackend(config, **options)
    if name == "outlines":
        from vllm.v1.structured_output.backend_outlines import OutlinesBackend

        return OutlinesBackend(config, **options)
    from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend

    return LMFormatEnforcerBackend(config, **options)


def _rewritten(
    outputs: StructuredOutputsParams, constraint: dict[str, Any]
) -> dict[str, Any] | None:
    for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag"):
        value = getattr(outputs, name)
        if value is not None and constraint.get(name) != value:
            return {name: value}
    return None


def examine(compiler: Compiler, constraint: dict[str, Any]) -> Verdict:
    """Compile a guide in a child process with limits of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            _compile_within_limits(compiler, constraint, writer)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return _ended_by(os.WTERMSIG(status))
    if not answer:
        return Verdict("rejected", "makes its compiler fail")
    return Verdict(**json.loads(answer))


def _ended_by(number: int) -> Verdict:
    if number == signal.SIGPROF:
        seconds = limits.GUIDE_CPU_SECONDS
        return Verdict("rejected", f"takes more than {seconds:g} s to compile")
    if number == signal.SIGALRM:
        return Verdict("busy", "the guide could not be compiled in time on a busy machine")
    return Verdict("rejected", "makes its compiler fail")


def _compile_within_limits(compiler: Compiler, constraint: dict[str, Any], writer: int) -> None:
    # Compilers warn of a guide there, as often as a client sends one.
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    warnings = os.memfd_create("warnings")
    os.dup2(warnings, 2)
    sys.stderr = sys.stdout
    _limit_memory()
    # Both end the process by themselves, also when nobody is left to wait for it.
    signal.setitimer(signal.ITIMER_PROF, limits.GUIDE_CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, limits.GUIDE_WALL_SECONDS)

    def compile_guide() -> None:
        try:
            verdict = compiler.compile(constraint)
            if forges_lines(os.pread(warnings, _MOST_WARNING_BYTES, 0)):
                verdict = Verdict("rejected", "has its compiler print what is not a plain line")
        except TooSlow:
            seconds = limits.GUIDE_STEP_SECONDS
            verdict = Verdict("rejected", f"takes more than {seconds:g} s for one token")
        except MemoryError:
            verdict = Verdict("rejected", "takes too much memory to compile")
        except BaseException as error:
            verdict = Verdict("rejected", "does not compile: " + short_reason(_reason(error)))
        with open(writer, "wb") as answer:
            answer.write(json.dumps(asdict(verdict)).encode())

    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=compile_guide)
    thread.start()
    thread.join()


def forges_lines(warnings: bytes) -> bool:
    """Whether a guide has control of the log: the engine compiles it again, and warns there."""
    lines = warnings.decode(errors="replace").split("\n")
    return not all(_WARNING.match(line) and line.isprintable() for line in lines if line)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    most = pages * resource.getpagesize() + limits.GUIDE_MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _reason(error: BaseException) -> str:
    """What the compiler itself said, below what vLLM wraps around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, KeyError):
        return f"the key {error} is missing"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)


def main(descriptor: int) -> None:
    """Answer on the connection until its other end closes, which it does with the server."""
    os.nice(_NICENESS)
    link = Connection(descriptor)
    try:
        config: VllmConfig = pickle.loads(link.recv_bytes())
        compiler, flaw = None, ""
        try:
            compiler = Compiler(config)
        except Exception as error:
            flaw = short_reason(_reason(error))
        while True:
            constraint = json.loads(link.recv_bytes())["constraint"]
            verdict = (
                Verdict("unsupported", f"does not work with this tokenizer: {flaw}")
                if compiler is None
                else examine(compiler, constraint)
            )
            link.send_bytes(json.dumps(asdict(verdict)).encode())
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main(int(sys.argv[1]))
