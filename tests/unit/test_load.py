"""GetLoad over a real connection."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from grpc import StatusCode, aio

from openengine_vllm.engine.stats import Demand
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.errors import from_rpc_error
from tests.unit.scripted_engine import Service, scheduler_stats, serve

SCALARS = (
    "timestamp_unix_nanos",
    "running_requests",
    "queued_requests",
    "active_kv_sessions",
    "used_kv_blocks",
    "total_kv_blocks",
    "running_tokens",
    "waiting_tokens",
    "prefill_batch_size",
    "decode_batch_size",
)


def present(message: Message) -> set[str]:
    return {field.name for field, _ in message.ListFields()}


async def load(service: Service, *, per_rank: bool = False) -> pb.LoadInfo:
    answer: pb.LoadInfo = await service.call(
        "GetLoad", pb.GetLoadRequest(include_per_rank=per_rank)
    )
    return answer


async def test_an_idle_engine_tells_its_zeros() -> None:
    async with serve() as service:
        service.engine.stats.configure((3,), 50, prefix_caching=False)
        answer = await load(service, per_rank=True)
        assert answer.instance_id == "instance"
        assert {*SCALARS, "instance_id", "ranks", "attributes"} == present(answer)
        for name in set(SCALARS) - {"timestamp_unix_nanos", "total_kv_blocks"}:
            assert getattr(answer, name) == 0, name
        assert answer.total_kv_blocks == 50
        [rank] = answer.ranks
        assert rank.data_parallel_rank == 3
        assert present(rank) == {field.name for field in rank.DESCRIPTOR.fields}
        assert set(answer.attributes) == {
            "generation_tokens_per_second",
            "prompt_tokens_per_second",
        }
        assert not (await load(service)).ranks


async def test_a_busy_engine_and_its_only_rank_agree() -> None:
    async with serve() as service:
        service.engine.stats.configure((0,), 101, prefix_caching=True)
        service.engine.stats.record(
            0, scheduler_stats(num_running_reqs=2, kv_cache_usage=0.2, prefill=1, decode=1)
        )
        service.engine.demand = Demand(5, 1, 70, 30)
        answer = await load(service, per_rank=True)
        assert (answer.running_requests, answer.queued_requests) == (2, 4)
        assert (answer.used_kv_blocks, answer.total_kv_blocks) == (20, 101)
        assert (answer.running_tokens, answer.waiting_tokens) == (70, 30)
        assert (answer.prefill_batch_size, answer.decode_batch_size) == (1, 1)
        [rank] = answer.ranks
        assert (rank.running_requests, rank.queued_requests) == (2, 4)
        assert (rank.used_kv_blocks, rank.total_kv_blocks) == (20, 101)
        assert (rank.prefill_batch_size, rank.decode_batch_size) == (1, 1)


async def test_several_ranks() -> None:
    async with serve() as service:
        service.engine.stats.configure((4, 5), 101, prefix_caching=True)
        service.engine.stats.record(4, scheduler_stats(num_running_reqs=1, decode=1))
        service.engine.stats.record(
            5, scheduler_stats(num_running_reqs=1, num_waiting_reqs=1, prefill=1)
        )
        service.engine.demand = Demand(3, 0, 0, 0)
        answer = await load(service, per_rank=True)
        assert (answer.running_requests, answer.queued_requests) == (2, 1)
        assert answer.total_kv_blocks == 202
        assert [
            (rank.data_parallel_rank, rank.running_requests, rank.queued_requests)
            for rank in answer.ranks
        ] == [(4, 1, 0), (5, 1, 1)]


async def test_without_a_kv_cache_its_blocks_are_absent() -> None:
    async with serve() as service:
        answer = await load(service)
        assert not answer.HasField("used_kv_blocks")
        assert not answer.HasField("total_kv_blocks")


async def test_it_answers_while_draining_and_not_before_or_after() -> None:
    async with serve(ready=False) as service:
        for code in ("OVERLOADED", "INTERNAL"):
            with pytest.raises(aio.AioRpcError) as caught:
                await load(service)
            error = from_rpc_error(caught.value)
            assert (error.code_name, error.status) == (code, StatusCode.UNAVAILABLE)
            service.make_ready()
            service.lifecycle.drain()
            await load(service)
            service.lifecycle.fail()
