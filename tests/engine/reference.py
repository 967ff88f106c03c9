"""Runs the cases on vLLM's own `AsyncLLM` and writes what came out, as JSON.

    python -m tests.engine.reference RESULT ENGINE-FLAGS

A process of its own, so that the tests' process never holds an engine. It takes requests one at
a time, as the tests send them, so that both sides compute the same batches.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from tests.engine.cases import CASES, Case, vllm_options

_SEEDS_TO_TRY = 32


class Reference:
    """One engine and the cases that it answers."""

    def __init__(self, llm: AsyncLLM, tokenizer: Tokenizer) -> None:
        self._llm = llm
        self._tokenizer = tokenizer
        self._serial = itertools.count()
        self._eos_seeds: dict[int, int] = {}

    async def answer(self, case: Case) -> dict[str, Any]:
        """What vLLM makes of a case, and the options that it came to."""
        prompt = case.prompt_for(self._tokenizer)
        options = dict(case.options)
        if case.ends_at_eos:
            options["seed"] = await self._seed_for_eos(prompt, options)
        if case.stop or case.stop_token_ids:
            free = {**options, "min_tokens": 0, "num_sequences": 1}
            [plain] = (await self._run(prompt, free))["outputs"]
            if case.stop:
                options["stop"] = case.stop(plain["text"])
            if case.stop_token_ids:
                options["stop_token_ids"] = case.stop_token_ids(plain["token_ids"])
        return {"options": options, **await self._run(prompt, options)}

    async def _seed_for_eos(self, prompt: str | list[int], options: dict[str, Any]) -> int:
        first = options["seed"]
        if first not in self._eos_seeds:
            plain = {key: options[key] for key in ("temperature", "max_tokens")}
            seeds = range(first, first + _SEEDS_TO_TRY)
            answers = await asyncio.gather(*(self._run(prompt, plain | {"seed": s}) for s in seeds))
            lengths = {
                seed: len(output["token_ids"])
                for seed, answer in zip(seeds, answers, strict=True)
                for output in answer["outputs"]
                if output["finish_reason"] == "stop"
            }
            self._eos_seeds[first] = min(lengths, key=lengths.__getitem__)
        return self._eos_seeds[first]

    async def _run(self, prompt: str | list[int], options: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(**vllm_options(options), output_kind=RequestOutputKind.FINAL_ONLY)
        raw: Any = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        request_id = f"reference-{next(self._serial)}"
        [final] = [output async for output in self._llm.generate(raw, params, request_id)]
        return {
            "prompt_tokens": len(final.prompt_token_ids or ()),
            "outputs": [
                {
                    "token_ids": list(output.token_ids),
                    "text": output.text,
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                }
                for output in sorted(final.outputs, key=lambda output: output.index)
            ],
        }


def _configuration(llm: AsyncLLM) -> dict[str, Any]:
    config = llm.vllm_config
    return {
        "model": config.model_config.model,
        "max_model_len": config.model_config.max_model_len,
        "block_size": config.cache_config.block_size,
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "tokenizer_mode": str(config.model_config.tokenizer_mode),
    }


async def _answers(llm: AsyncLLM, model: str) -> dict[str, Any]:
    reference = Reference(llm, Tokenizer.from_file(str(Path(model) / "tokenizer.json")))
    return {case.name: await reference.answer(case) for case in CASES}


def main() -> None:
    """Answer all cases."""
    result, *flags = sys.argv[1:]
    parser = FlexibleArgumentParser()
    AsyncEngineArgs.add_cli_args(parser)
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(flags))
    llm = AsyncLLM.from_engine_args(args)
    try:
        answers = asyncio.run(_answers(llm, args.model))
        record = {"configuration": _configuration(llm), "answers": answers}
    finally:
        llm.shutdown()
    Path(result).write_text(json.dumps(record))


if __name__ == "__main__":
    main()
