"""What a request wants to know of each token: checked here, and told to the engine from here.

The tables of what is offered serve discovery and validation alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from openengine_vllm.engine.checks import check_token_ids, rejected, unsupported
from openengine_vllm.engine.facts import ModelFacts
from openengine_vllm.engine.gate import BatchKind
from openengine_vllm.engine.outputs import StopRules
from openengine_vllm.protocol import v1 as pb

MOST_LISTED_IDS = 128
"""Explicit candidate ids of one request; vLLM's own limit (MAX_LOGPROB_TOKEN_IDS)."""
MOST_HELD_BYTES = 64 * 1024 * 1024
"""Scores of one request that a stop text may hold back."""
BYTES_A_SCORE = 8
"""A token id and a score, as they are kept until they are sent."""

TOP_N = pb.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N
TOKEN_IDS = pb.CANDIDATE_TOKEN_SELECTION_MODE_TOKEN_IDS
ALL = pb.CANDIDATE_TOKEN_SELECTION_MODE_ALL
Mode: TypeAlias = pb.CandidateTokenSelectionMode.ValueType

_MODES = {"top_n": TOP_N, "token_ids": TOKEN_IDS, "all": ALL}
_EVENT_OVERHEAD = 2048
"""Bytes of an event around its records; the request id is most of it."""
_RECORD_OVERHEAD = 48
"""Bytes of a TokenInfo besides its text and its candidates."""
_CANDIDATE_OVERHEAD = 32
"""Bytes of a LogProb besides its text."""
_LONGEST_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class Candidates:
    """Which other tokens are scored at a position.

    Attributes:
        count: how many there are at the most.
        token_ids: in the order asked for, in mode TOKEN_IDS.
    """

    mode: Mode
    count: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenInformation:
    """What is asked about the tokens of one request.

    Attributes:
        outputs: output tokens carry a score and a rank.
        output_candidates: and these candidates.
        prompt: a prompt event with scores and ranks comes first.
        prompt_candidates: and these candidates.
        prompt_start: the first position of the prompt event.
    """

    outputs: bool = False
    output_candidates: Candidates | None = None
    prompt: bool = False
    prompt_candidates: Candidates | None = None
    prompt_start: int = 0

    @property
    def batch_kind(self) -> BatchKind | None:
        """What this request must not meet in a batch, if anything."""
        if self.output_candidates is None:
            return None
        listed = self.output_candidates.mode == TOKEN_IDS
        return BatchKind.LISTED if listed else BatchKind.RANKED

    def engine_options(self, index: int) -> dict[str, Any]:
        """Keyword arguments of vLLM's SamplingParams for one output.

        The prompt is the same for all outputs, so only the first is asked about it.
        """
        options: dict[str, Any] = {}
        if self.outputs:
            options["logprobs"] = 0
            if (candidates := self.output_candidates) is not None:
                if candidates.mode == TOKEN_IDS:
                    unique = list(dict.fromkeys(candidates.token_ids))
                    options |= {"logprobs": len(unique), "logprob_token_ids": unique}
                else:
                    options["logprobs"] = -1 if candidates.mode == ALL else candidates.count
        if self.prompt and not index:
            chosen = self.prompt_candidates
            options["prompt_logprobs"] = chosen.count if chosen is not None else 0
        return options


NO_INFORMATION = TokenInformation()


def output_modes(model: ModelFacts) -> Sequence[Mode]:
    """How the candidates of output tokens can be chosen."""
    modes = [TOP_N, TOKEN_IDS] if model.max_logprobs else [TOKEN_IDS]
    return [*modes, ALL] if model.max_logprobs >= model.vocab_size else modes


def prompt_modes(model: ModelFacts) -> Sequence[Mode]:
    """How the candidates of prompt tokens can be chosen."""
    return [TOP_N] if model.max_logprobs else []


def plan_information(request: pb.GenerateRequest, model: ModelFacts) -> TokenInformation:
    """Check the response options of a request.

    Raises:
        OpenEngineError: with the path of the field at fault and what it allows.
    """
    if not request.HasField("response"):
        return NO_INFORMATION
    response = request.response
    outputs = _candidates(response, "output_candidates", output_modes(model), model)
    prompt = _candidates(response, "prompt_candidates", prompt_modes(model), model)
    return TokenInformation(
        outputs=response.return_output_logprobs or outputs is not None,
        output_candidates=outputs,
        prompt=response.return_prompt_logprobs or prompt is not None,
        prompt_candidates=prompt,
        prompt_start=response.prompt_logprob_start,
    )


def check_prompt_information(
    wanted: TokenInformation, prompt_ids: Sequence[int], model: ModelFacts, most_bytes: int
) -> None:
    """Reject a prompt event that begins behind the prompt or can't fit into a message."""
    if not wanted.prompt:
        return
    path = "response.prompt_logprob_start"
    if wanted.prompt_start >= len(prompt_ids):
        raise rejected(
            path, f"is {wanted.prompt_start}; allowed is 0 to {len(prompt_ids) - 1} for this prompt"
        )
    positions = len(prompt_ids) - wanted.prompt_start
    own = positions * _RECORD_OVERHEAD + model.pieces.total_size(prompt_ids[wanted.prompt_start :])
    size = _EVENT_OVERHEAD + own + positions * _candidates_size(wanted.prompt_candidates, model)
    if size > most_bytes:
        at_fault = "prompt_candidates" if wanted.prompt_candidates else "return_prompt_logprobs"
        raise rejected(
            f"response.{at_fault}",
            f"for {positions} positions may take {size} bytes; a response message is limited to "
            f"{most_bytes} (ask for fewer candidates, or set response.prompt_logprob_start)",
        )


def check_output_information(
    wanted: TokenInformation,
    model: ModelFacts,
    most_bytes: int,
    sequences: int,
    rules: StopRules,
) -> None:
    """Reject candidates that can't fit into a message, or into memory while held back."""
    candidates = wanted.output_candidates
    if candidates is None:
        return
    path = "response.output_candidates"
    # A token's text is in its record and in the text of the event.
    own = _RECORD_OVERHEAD + 2 * model.pieces.longest(1)
    size = _EVENT_OVERHEAD + own + _candidates_size(candidates, model)
    if size > most_bytes:
        raise rejected(
            path,
            f"of {candidates.count} tokens may take {size} bytes a position; a response message "
            f"is limited to {most_bytes}",
        )
    positions = sequences * (rules.most_held_back + 1) * _LONGEST_CHARACTER
    held = positions * candidates.count * BYTES_A_SCORE if rules.most_held_back else 0
    if held > MOST_HELD_BYTES:
        raise rejected(
            path,
            f"of {candidates.count} tokens may fill {held} bytes while stop texts hold them "
            f"back; {MOST_HELD_BYTES} are allowed",
        )


def _candidates(
    response: pb.ResponseOptions, name: str, modes: Sequence[Mode], model: ModelFacts
) -> Candidates | None:
    if not response.HasField(name):  # type: ignore[arg-type]
        return None
    path = f"response.{name}"
    selection: pb.CandidateTokenSelection = getattr(response, name)
    kind = selection.WhichOneof("selection")
    if kind is None:
        raise rejected(path, "must set top_n, token_ids or all")
    mode = _MODES[kind]
    if mode not in modes:
        raise unsupported(f"{path}.{kind}", _why_not(name, mode, model))
    if mode == TOP_N:
        if not 1 <= selection.top_n <= model.max_logprobs:
            raise rejected(
                f"{path}.top_n", f"is {selection.top_n}; allowed is 1 to {model.max_logprobs}"
            )
        return Candidates(mode, selection.top_n)
    if mode == ALL:
        return Candidates(mode, model.vocab_size)
    count = len(selection.token_ids.ids)
    if not 1 <= count <= MOST_LISTED_IDS:
        raise rejected(
            f"{path}.token_ids.ids", f"has {count} entries; allowed are 1 to {MOST_LISTED_IDS}"
        )
    ids = tuple(selection.token_ids.ids)
    check_token_ids(ids, f"{path}.token_ids.ids", model)
    return Candidates(mode, len(ids), ids)


def _why_not(name: str, mode: Mode, model: ModelFacts) -> str:
    if mode == TOP_N:
        return "needs an engine whose --max-logprobs is not 0"
    if mode == ALL and name == "output_candidates":
        return f"needs an engine with --max-logprobs -1; this one scores {model.max_logprobs}"
    return "is not supported for the prompt by this engine"


def _candidates_size(candidates: Candidates | None, model: ModelFacts) -> int:
    if candidates is None:
        return 0
    if candidates.mode == TOKEN_IDS:
        texts = sum(model.pieces.size(token_id) for token_id in candidates.token_ids)
    else:
        texts = model.pieces.longest(candidates.count)
    return texts + candidates.count * _CANDIDATE_OVERHEAD
