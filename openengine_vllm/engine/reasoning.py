"""Counts the reasoning tokens of an output, with the reasoning parser that vLLM was given.

A parser counts in what was generated. Where a chat template opens or closes the reasoning in
the prompt, the markers there are taken into account as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import structlog

if TYPE_CHECKING:
    from vllm.reasoning import ReasoningParser
    from vllm.v1.engine.async_llm import AsyncLLM

_log = structlog.get_logger(__name__)

ReasoningCounter: TypeAlias = Callable[[Sequence[int], Sequence[Sequence[int]]], int | None]
"""Takes the prompt's ids and those of each output; None when the parser could not tell."""


def reasoning_counter(llm: AsyncLLM) -> ReasoningCounter | None:
    """A counter, or None without a parser, or with one that does not count."""
    settings = llm.vllm_config.structured_outputs_config
    tokenizer = llm.renderer.tokenizer
    if not settings.reasoning_parser or tokenizer is None:
        return None
    from vllm.reasoning import ReasoningParserManager

    if settings.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(settings.reasoning_parser_plugin)
    return counter(settings.reasoning_parser, tokenizer)


def counter(name: str, tokenizer: Any) -> ReasoningCounter | None:
    """A counter for the parser of this name; see :func:`reasoning_counter`."""
    from vllm.reasoning import ReasoningParser, ReasoningParserManager

    try:
        parser_class = ReasoningParserManager.get_reasoning_parser(name)
        parser_class(tokenizer)
    except Exception as error:
        _log.warning("reasoning tokens are not counted", parser=name, error=str(error))
        return None
    if parser_class.count_reasoning_tokens is ReasoningParser.count_reasoning_tokens:
        _log.info("this reasoning parser does not count tokens", parser=name)
        return None

    def count(prompt_ids: Sequence[int], outputs: Sequence[Sequence[int]]) -> int | None:
        try:
            parser = parser_class(tokenizer)
            return sum(_count(parser, prompt_ids, output) for output in outputs)
        except Exception as error:
            _log.error("reasoning parser failed", parser=name, error=type(error).__name__)
            return None

    return count


def _count(parser: ReasoningParser, prompt_ids: Sequence[int], output: Sequence[int]) -> int:
    start = _marker(parser, parser.reasoning_start_str)
    end = _marker(parser, parser.reasoning_end_str)
    ids = list(output)
    first = next((token_id for token_id in ids if token_id in (start, end)), None)
    before = 0
    if parser.is_reasoning_end(list(prompt_ids)):
        # Closed in the prompt: only what the model opens again is reasoning.
        ids = ids[ids.index(start) :] if start is not None and start in ids else []
    elif start is not None and first != start and _opens(prompt_ids, start, end, first):
        before = parser.count_reasoning_tokens([start])
        ids.insert(0, start)
    counted = parser.count_reasoning_tokens(ids) - before if ids else 0
    return max(0, min(counted, len(output)))


def _opens(prompt_ids: Sequence[int], start: int, end: int | None, first: int | None) -> bool:
    """Whether reasoning runs when the output begins: the prompt has opened it, or the output
    closes what nothing has opened.
    """
    markers = (token_id for token_id in reversed(prompt_ids) if token_id in (start, end))
    return next(markers, None) == start or (end is not None and first == end)


def _marker(parser: ReasoningParser, text: str | None) -> int | None:
    return None if text is None else parser.vocab.get(text)
