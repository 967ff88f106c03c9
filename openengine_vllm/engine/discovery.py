"""What the live engine is and can do, as facts for validation and as discovery messages.

Everything is read from the running engine's configuration. What vLLM does not tell stays
absent; capabilities come from the same facts that requests are checked against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from openengine_vllm.engine.facts import ModelFacts
from openengine_vllm.engine.guided import guide_modes
from openengine_vllm.engine.pieces import Pieces
from openengine_vllm.engine.token_information import TOP_N, Mode, output_modes, prompt_modes
from openengine_vllm.limits import RequestLimits
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.revision import (
    MINIMUM_CLIENT_REVISION,
    OPENENGINE,
    SCHEMA_REVISION,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

ENGINE_NAME = "vllm"


def model_facts(llm: AsyncLLM, served_names: tuple[str, ...], pieces: Pieces) -> ModelFacts:
    """The facts that requests are validated against."""
    config = llm.vllm_config
    model = config.model_config
    vocab_size = model.get_vocab_size()
    return ModelFacts(
        served_names=served_names,
        max_model_len=model.max_model_len,
        vocab_size=vocab_size,
        has_tokenizer=not model.skip_tokenizer_init,
        generates=model.runner_type == "generate",
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
        priority_scheduling=config.scheduler_config.policy == "priority",
        data_parallel_ranks=tuple(llm.engine_core.engine_ranks_managed),
        default_sampling=model.get_diff_sampling_param(),
        max_logprobs=vocab_size
        if model.max_logprobs == -1
        else min(model.max_logprobs, vocab_size),
        pieces=pieces,
        decode_context_parallel_size=config.parallel_config.decode_context_parallel_size,
        thinking_budget=_has_thinking_budget(config),
        guide_backend=_guide_backend(config),
    )


def _has_thinking_budget(config: VllmConfig) -> bool:
    reasoning = getattr(config, "reasoning_config", None)
    return bool(reasoning is not None and reasoning.enabled)


def _guide_backend(config: VllmConfig) -> str:
    model = config.model_config
    if model.skip_tokenizer_init or model.is_diffusion or model.runner_type != "generate":
        return ""
    return str(config.structured_outputs_config.backend)


def has_chat_template(llm: AsyncLLM) -> bool:
    """Whether the model's tokenizer brings a chat template."""
    return bool(getattr(llm.renderer.tokenizer, "chat_template", None))


def engine_info(
    config: VllmConfig,
    facts: ModelFacts,
    instance_id: str,
    role: pb.EngineRole.ValueType,
    version: str,
) -> pb.EngineInfo:
    """The answer to GetEngineInfo; ``version`` is the installed vLLM's."""
    parallel = config.parallel_config
    return pb.EngineInfo(
        engine_name=ENGINE_NAME,
        engine_version=version,
        role=role,
        instance_id=instance_id,
        supported_models=facts.served_names,
        parallelism=pb.ParallelismInfo(
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
            data_parallel_rank=facts.data_parallel_ranks[0]
            if len(facts.data_parallel_ranks) == 1
            else None,
            data_parallel_start_rank=min(facts.data_parallel_ranks),
        ),
        kv_connector=pb.KvConnectorInfo(enabled=False),
        schema_revision=SCHEMA_REVISION,
        minimum_client_revision=MINIMUM_CLIENT_REVISION,
        schema_release=OPENENGINE.schema_release,
    )


def model_info(config: VllmConfig, facts: ModelFacts, allowed: RequestLimits) -> pb.ModelInfo:
    """The answer to GetModelInfo."""
    model = config.model_config
    info = pb.ModelInfo(
        model_id=model.model,
        served_model_name=facts.served_names[0],
        served_model_aliases=facts.served_names[1:],
        max_context_length=facts.max_model_len,
        max_running_requests=config.scheduler_config.max_num_seqs,
        max_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        supports_text_input=facts.has_tokenizer,
        supports_token_ids_input=True,
        supports_lora=False,
        supports_multimodal=False,
        reasoning_parser=config.structured_outputs_config.reasoning_parser,
    )
    if facts.has_tokenizer:
        info.tokenizer_modes.append(str(model.tokenizer_mode))
    if facts.generates:
        info.max_output_tokens = facts.max_model_len - 1
        info.generation.CopyFrom(_generation(facts, allowed))
    blocks = config.cache_config.num_gpu_blocks
    if blocks and facts.generates:
        info.kv_block_size = config.cache_config.block_size
        info.total_kv_blocks = blocks // len(facts.data_parallel_ranks)
    return info


def _logprobs(modes: Sequence[Mode], facts: ModelFacts) -> pb.LogprobCapabilities:
    return pb.LogprobCapabilities(
        supported=True,
        candidate_selection_modes=modes,
        max_top_n=facts.max_logprobs if TOP_N in modes else None,
    )


def _generation(facts: ModelFacts, allowed: RequestLimits) -> pb.GenerationCapabilities:
    return pb.GenerationCapabilities(
        prompt_logprobs=_logprobs(prompt_modes(facts), facts),
        output_logprobs=_logprobs(output_modes(facts), facts),
        guided_decoding=pb.GuidedDecodingCapabilities(
            supported=bool(facts.guide_backend), modes=guide_modes(facts)
        ),
        max_num_sequences=allowed.max_sequences,
        supports_priority=facts.priority_scheduling,
        supports_stop_in_output=True,
        supports_cache_salt=facts.prefix_caching,
        supports_prefix_cache_bypass=True,
    )
