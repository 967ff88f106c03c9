"""A GenerateRequest checked against the model, and turned into a plan that the engine can run.

Pure functions: a message in, a :class:`GenerationPlan` out, or an error that names the field at
fault and what it allows. Nothing that is not understood here reaches vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openengine_vllm import limits
from openengine_vllm.engine.checks import check_token_ids, rejected, unsupported
from openengine_vllm.engine.extra import NOTHING, ExtraOptions, plan_extra
from openengine_vllm.engine.facts import ModelFacts
from openengine_vllm.engine.guided import Guide, plan_guide
from openengine_vllm.engine.outputs import StopRules
from openengine_vllm.engine.stops import StopAutomaton
from openengine_vllm.engine.token_information import (
    TokenInformation,
    check_output_information,
    plan_information,
)
from openengine_vllm.limits import RequestLimits
from openengine_vllm.protocol import errors, split
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.translation import check_known

SEED_MASK = (1 << 63) - 1
"""vLLM's seeds repeat modulo 2^63 and overflow near 2^64, so they are folded beforehand."""


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A request that is valid for this model; all that is left is to tokenize a text prompt."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int] | None
    sequences: int
    sampling: Mapping[str, Any]
    """Keyword arguments of vLLM's SamplingParams, without seed and max_tokens."""
    seed: int | None
    max_tokens: int | None
    """As asked or as the model's default says; None means up to the context."""
    min_tokens: int
    rules: StopRules
    information: TokenInformation
    priority: int
    """In the contract's sense: larger is sooner."""
    cache_salt: str | None
    bypass_prefix_cache: bool
    data_parallel_rank: int | None
    guide: Guide | None = None
    skip_special_tokens: bool = True
    """Whether the text leaves special tokens out."""
    truncate_prompt_tokens: int | None = None
    """A text prompt's last tokens that are kept."""
    detailed_errors: bool = True
    """Whether an EngineError on the stream tells all there is to tell."""

    def seed_for(self, index: int) -> int | None:
        """The seed of one output; outputs of a seeded request differ as they do in vLLM."""
        return None if self.seed is None else (self.seed + index) & SEED_MASK


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request whose prompt is tokenized."""

    plan: GenerationPlan
    prompt: Mapping[str, Any]
    """As vLLM's renderer made it."""
    prompt_ids: list[int]


def plan_generation(
    request: pb.GenerateRequest,
    model: ModelFacts,
    allowed: RequestLimits,
    extra: split.Struct | None = None,
    *,
    detailed_errors: bool = True,
) -> GenerationPlan:
    """Check every field of a request for an aggregated engine.

    Args:
        extra: parameters of vLLM's own, which came beside it.
        detailed_errors: see the plan.

    Raises:
        OpenEngineError: with the path of the field at fault and what it allows.
    """
    if not model.generates:
        raise errors.unsupported_task("generate")
    request_id = check_request_id(request.request_id)
    if request.model and request.model not in model.served_names:
        raise errors.model_not_found(request.model)
    _check_unsupported(request)
    _check_metadata(request.metadata)
    options = NOTHING
    if extra is not None:
        options = plan_extra(
            extra, model, guided=request.HasField("guided"), forbidden=_forbidden(request.stopping)
        )
    prompt, prompt_ids = _prompt(request, model, options)
    sequences = _sequences(request.sampling, allowed)
    sampling = _sampling(request.sampling, model)
    if sequences > 1 and sampling.get("temperature", 1.0) == 0:
        raise rejected(
            "sampling.num_sequences", "must be 1 when temperature is 0 (greedy sampling)"
        )
    max_tokens, min_tokens = _lengths(request.stopping, model)
    rules = _stop_rules(request.stopping, model, allowed, min_tokens)
    information = plan_information(request, model)
    check_output_information(information, model, allowed.max_response_bytes, sequences, rules)
    kv = request.kv
    return GenerationPlan(
        request_id=request_id,
        prompt=prompt,
        prompt_ids=prompt_ids,
        sequences=sequences,
        sampling={
            **sampling,
            **options.sampling,
            "stop_token_ids": sorted(rules.token_ids),
            "ignore_eos": request.stopping.ignore_eos,
            "min_tokens": min_tokens,
        },
        seed=request.sampling.seed & SEED_MASK if request.sampling.HasField("seed") else None,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        rules=rules,
        information=information,
        priority=_priority(request, model),
        cache_salt=_cache_salt(kv, model),
        bypass_prefix_cache=kv.bypass_prefix_cache,
        data_parallel_rank=_rank(kv, model),
        guide=plan_guide(request, model),
        skip_special_tokens=options.skip_special_tokens,
        truncate_prompt_tokens=options.truncate_prompt_tokens,
        detailed_errors=detailed_errors,
    )


def check_request_id(request_id: str) -> str:
    """A request id that is present, printable and not too long, or INVALID_ARGUMENT."""
    if not 0 < len(request_id) <= limits.MAX_REQUEST_ID_LENGTH or not request_id.isprintable():
        raise rejected(
            "request_id",
            f"is required and takes 1 to {limits.MAX_REQUEST_ID_LENGTH} printable characters",
        )
    return request_id


def check_prompt_length(length: int, min_tokens: int, field_path: str, model: ModelFacts) -> None:
    """Reject a prompt that is empty or leaves no room for an answer in the context."""
    if not length:
        raise rejected(field_path, "must hold at least one token")
    room = model.max_model_len - length
    if room < 1:
        raise rejected(
            field_path,
            f"has {length} tokens; the context of {model.max_model_len} tokens "
            "must leave room for at least one token of output",
        )
    if min_tokens > room:
        raise rejected(
            "stopping.min_tokens",
            f"is {min_tokens}, but only {room} tokens fit behind the prompt",
        )


def _check_unsupported(request: pb.GenerateRequest) -> None:
    if request.HasField("kv"):
        if request.kv.HasField("session"):
            raise errors.role_mismatch(
                "kv.session", "kv.session is for a DECODE engine; this one is AGGREGATED"
            )
        check_known(request.kv, "kv")
    if request.media:
        raise unsupported("media", "is not supported by this server")
    if request.lora_name:
        raise unsupported("lora_name", "is not supported by this server")


def _forbidden(stopping: pb.StoppingOptions) -> frozenset[int]:
    """Stop token ids that ``min_tokens`` keeps from the first tokens."""
    if not stopping.min_tokens:
        return frozenset()
    return frozenset(
        condition.stop_token_id
        for condition in stopping.conditions
        if condition.HasField("stop_token_id")
    )


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > limits.MAX_METADATA_ENTRIES:
        raise rejected(
            "metadata", f"has {len(metadata)} entries; {limits.MAX_METADATA_ENTRIES} allowed"
        )
    size = sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items())
    if size > limits.MAX_METADATA_BYTES:
        raise rejected("metadata", f"has {size} bytes; {limits.MAX_METADATA_BYTES} are allowed")


def _prompt(
    request: pb.GenerateRequest, model: ModelFacts, options: ExtraOptions
) -> tuple[str | None, list[int] | None]:
    kind = request.WhichOneof("input")
    if kind == "prompt":
        if not model.has_tokenizer:
            raise unsupported("prompt", "needs a tokenizer; this engine takes token_ids only")
        prompt = request.prompt  # decoded at each access
        if not prompt:
            raise rejected("prompt", "must not be empty")
        return prompt, None
    if kind == "token_ids":
        ids = truncated(request.token_ids.ids[:], options.truncate_prompt_tokens)
        check_prompt_length(len(ids), 0, "token_ids.ids", model)
        check_token_ids(ids, "token_ids.ids", model)
        return None, ids
    raise rejected("input", "is required: set prompt or token_ids")


def truncated(ids: list[int], most: int | None) -> list[int]:
    """The last ``most`` of them; all for None."""
    return ids if most is None or len(ids) <= most else ids[-most:]


def _sequences(sampling: pb.SamplingParams, allowed: RequestLimits) -> int:
    if not sampling.HasField("num_sequences"):
        return 1
    if not 1 <= sampling.num_sequences <= allowed.max_sequences:
        raise rejected(
            "sampling.num_sequences",
            f"is {sampling.num_sequences}; allowed are 1 to {allowed.max_sequences}",
        )
    return sampling.num_sequences


_LEAST_FLOAT = 2.0**-126
_LARGEST_FLOAT = (2 - 2.0**-23) * 2.0**127
"""The range of normal 32-bit floats, which the engine computes with."""


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float
    text: str
    open_low: bool = False

    def holds(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        above = value > self.low if self.open_low else value >= self.low
        return above and value <= self.high


_RANGES = {
    "temperature": _Range(0, 2, "0 to 2"),
    "top_p": _Range(0, 1, "above 0 and up to 1", open_low=True),
    "top_k": _Range(-1, 2**31 - 1, "-1 or 0 (off) and up"),
    "min_p": _Range(0, 1, "0 to 1"),
    "frequency_penalty": _Range(-2, 2, "-2 to 2"),
    "presence_penalty": _Range(-2, 2, "-2 to 2"),
    "repetition_penalty": _Range(_LEAST_FLOAT, _LARGEST_FLOAT, "above 0 and within a 32-bit float"),
}


def _sampling(sampling: pb.SamplingParams, model: ModelFacts) -> dict[str, Any]:
    values = {name: value for name, value in model.default_sampling.items() if name in _RANGES}
    for name, allowed in _RANGES.items():
        if not sampling.HasField(name):  # type: ignore[arg-type]
            continue
        value = getattr(sampling, name)
        if not allowed.holds(value):
            raise rejected(f"sampling.{name}", f"is {value}; allowed is {allowed.text}")
        values[name] = value
    return values


def _lengths(stopping: pb.StoppingOptions, model: ModelFacts) -> tuple[int | None, int]:
    max_tokens: int | None = model.default_sampling.get("max_tokens")
    if stopping.HasField("max_tokens"):
        max_tokens = stopping.max_tokens
        if not max_tokens:
            raise rejected("stopping.max_tokens", "is 0; it must be at least 1 when present")
    longest = model.max_model_len - 1
    if stopping.min_tokens > longest:
        raise rejected(
            "stopping.min_tokens", f"is {stopping.min_tokens}; the context allows {longest}"
        )
    if max_tokens is not None and stopping.min_tokens > max_tokens:
        raise rejected(
            "stopping.min_tokens",
            f"is {stopping.min_tokens}, which is more than max_tokens ({max_tokens})",
        )
    return max_tokens, stopping.min_tokens


def _stop_rules(
    stopping: pb.StoppingOptions, model: ModelFacts, allowed: RequestLimits, min_tokens: int
) -> StopRules:
    if len(stopping.conditions) > allowed.max_stop_conditions:
        raise rejected(
            "stopping.conditions",
            f"has {len(stopping.conditions)} entries; {allowed.max_stop_conditions} are allowed",
        )
    texts: list[str] = []
    token_ids: set[int] = set()
    for position, condition in enumerate(stopping.conditions):
        path = f"stopping.conditions[{position}]"
        kind = condition.WhichOneof("condition")
        if kind == "stop_text":
            if not condition.stop_text:
                raise rejected(f"{path}.stop_text", "must not be empty")
            if not model.has_tokenizer:
                raise unsupported(f"{path}.stop_text", "needs a tokenizer; this engine has none")
            texts.append(condition.stop_text)
        elif kind == "stop_token_id":
            check_token_ids((condition.stop_token_id,), f"{path}.stop_token_id", model)
            token_ids.add(condition.stop_token_id)
        else:
            raise rejected(path, "must set stop_text or stop_token_id")
    size = sum(len(text.encode()) for text in texts)
    if size > allowed.max_stop_bytes:
        raise rejected(
            "stopping.conditions",
            f"hold {size} bytes of stop text; {allowed.max_stop_bytes} are allowed",
        )
    most = limits.MAX_STOP_TOKENS_WITH_MINIMUM
    if min_tokens and len(token_ids) > most:
        raise rejected(
            "stopping.conditions",
            f"has {len(token_ids)} stop token ids; {most} are allowed beside min_tokens",
        )
    return StopRules(
        automaton=StopAutomaton(texts) if texts else None,
        token_ids=frozenset(token_ids),
        include_in_output=stopping.include_stop_in_output,
        min_tokens=min_tokens,
    )


def _priority(request: pb.GenerateRequest, model: ModelFacts) -> int:
    if request.priority and not model.priority_scheduling:
        raise unsupported("priority", "needs an engine with --scheduling-policy priority")
    return request.priority


def _cache_salt(kv: pb.KvOptions, model: ModelFacts) -> str | None:
    if not kv.cache_salt:
        return None
    size = len(kv.cache_salt.encode())
    if size > limits.MAX_CACHE_SALT_BYTES:
        raise rejected(
            "kv.cache_salt", f"has {size} bytes; {limits.MAX_CACHE_SALT_BYTES} are allowed"
        )
    if not model.prefix_caching:
        raise unsupported("kv.cache_salt", "needs prefix caching, which is off")
    return kv.cache_salt


def _rank(kv: pb.KvOptions, model: ModelFacts) -> int | None:
    if not kv.HasField("data_parallel_rank"):
        return None
    if kv.data_parallel_rank not in model.data_parallel_ranks:
        ranks = ", ".join(map(str, model.data_parallel_ranks))
        raise rejected(
            "kv.data_parallel_rank", f"is {kv.data_parallel_rank}; this engine serves {ranks}"
        )
    return kv.data_parallel_rank
