"""Runs the cases on vLLM's own `AsyncLLM` and writes what came out, as JSON.

    python -m tests.engine.reference NAME RESULT ENGINE-FLAGS

NAME is a key of SETS. A process of its own, so that the tests' process never holds an engine.
It takes requests one at a time, as the tests send them, so that both sides compute the same
batches.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from tests.engine.cases import CASES, EXTRA, Case, vllm_options
from tests.engine.random_requests import RANDOM

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
        if case.stop or case.stop_token_ids or case.bad_words:
            free = {**options, "min_tokens": 0, "num_sequences": 1}
            [plain] = (await self._run(prompt, free))["outputs"]
            if case.stop:
                options["stop"] = case.stop(plain["text"])
            if case.stop_token_ids:
                options["stop_token_ids"] = case.stop_token_ids(plain["token_ids"])
            if case.bad_words:
                options["bad_words"] = case.bad_words(plain["token_ids"], self._tokenizer)
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
        given = dict(options)
        raw: Any = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        if salt := given.pop("cache_salt", ""):
            raw["cache_salt"] = salt
        given.pop("priority", None)
        if bias := given.pop("logit_bias", None):
            given["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
        params = SamplingParams(
            **_scores(given.pop("response", {})),
            structured_outputs=_guide(given.pop("guided", None)),
            skip_reading_prefix_cache=given.pop("bypass_prefix_cache", None) or None,
            **vllm_options(given),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request_id = f"reference-{next(self._serial)}"
        [final] = [output async for output in self._llm.generate(raw, params, request_id)]
        return {
            "prompt_ids": list(final.prompt_token_ids or ()),
            "prompt_scores": _rows(final.prompt_logprobs),
            "outputs": [
                {
                    "token_ids": list(output.token_ids),
                    "text": output.text,
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                    "scores": _rows(output.logprobs),
                }
                for output in sorted(final.outputs, key=lambda output: output.index)
            ],
        }


def _scores(response: Mapping[str, Any]) -> dict[str, Any]:
    """ResponseOptions by vLLM's names."""
    options: dict[str, Any] = {}
    if response.get("return_output_logprobs"):
        options["logprobs"] = 0
    chosen = response.get("output_candidates", {})
    if "top_n" in chosen:
        options["logprobs"] = chosen["top_n"]
    elif "token_ids" in chosen:
        options |= {"logprobs": None, "logprob_token_ids": chosen["token_ids"]["ids"]}
    elif "all" in chosen:
        options["logprobs"] = -1
    if response.get("return_prompt_logprobs"):
        options["prompt_logprobs"] = response.get("prompt_candidates", {}).get("top_n", 0)
    return options


def _guide(guided: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    """GuidedDecoding by vLLM's names."""
    if guided is None:
        return None
    ((kind, value),) = guided.items()
    match kind:
        case "choice":
            return StructuredOutputsParams(choice=value["choices"])
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            return StructuredOutputsParams(json=value)
        case "ebnf_grammar":
            return StructuredOutputsParams(grammar=value)
        case _:
            return StructuredOutputsParams(regex=value)


def _rows(logprobs: Any) -> list[dict[int, tuple[float, int | None]] | None] | None:
    """Scores and ranks by token id, one dict a position."""
    if logprobs is None:
        return None
    return [
        row and {token_id: (entry.logprob, entry.rank) for token_id, entry in row.items()}
        for row in logprobs
    ]


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


SETS = {"cases": (*CASES, *EXTRA), "random": RANDOM}


async def _answers(llm: AsyncLLM, model: str, cases: Sequence[Case]) -> dict[str, Any]:
    reference = Reference(llm, Tokenizer.from_file(str(Path(model) / "tokenizer.json")))
    return {case.name: await reference.answer(case) for case in cases}


def main() -> None:
    """Answer all cases."""
    name, result, *flags = sys.argv[1:]
    parser = FlexibleArgumentParser()
    AsyncEngineArgs.add_cli_args(parser)
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(flags))
    llm = AsyncLLM.from_engine_args(args)
    try:
        answers = asyncio.run(_answers(llm, args.model, SETS[name]))
        record = {"configuration": _configuration(llm), "answers": answers}
    finally:
        llm.shutdown()
    Path(result).write_text(json.dumps(record))


if __name__ == "__main__":
    main()
