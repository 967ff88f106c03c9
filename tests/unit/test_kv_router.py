"""The example router's parts, over Dynamo's own radix tree and servers that the test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from examples.kv_router.__main__ import main
from examples.kv_router.overlap import OutOfStepError, PrefixIndex
from examples.kv_router.routing import NoWorkerError, Router
from openengine_vllm.client import OpenEngineError
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.revision import SCHEMA_REVISION
from tests.support.calls import eventually
from tests.support.kv_messages import BLOCK, CLEARED, removed, stored, tokens_of
from tests.support.kv_publisher import publishers
from tests.support.scripted import Context, ScriptedServer, scripted_server
from tests.unit.kv_service import kv_service
from tests.unit.live_server import LiveServer, live_server


def prompt(*hashes: int) -> list[int]:
    """The tokens of these blocks."""
    return [token for value in hashes for token in tokens_of(value)]


def block_hash(value: int) -> pb.KvBlockHash:
    return pb.KvBlockHash(value=value.to_bytes(8, "big"), encoding="int64")


def batch(number: int, *hashes: int, parent: int | None = None, rank: int = 0) -> pb.KvEventBatch:
    """A batch that stores a chain of blocks."""
    message = pb.KvEventBatch(sequence_number=number, data_parallel_rank=rank)
    if hashes:
        event = message.events.add().block_stored
        event.block_hashes.extend(map(block_hash, hashes))
        event.token_ids.extend(prompt(*hashes))
        event.block_size = BLOCK
        event.medium = pb.STORAGE_MEDIUM_GPU
        if parent is not None:
            event.parent_block_hash.CopyFrom(block_hash(parent))
    return message


async def indexed(*batches: Sequence[Any]) -> PrefixIndex:
    """An index that has followed what a publisher sent, through the bridge."""
    index = PrefixIndex()
    async with publishers() as [publisher]:
        for events in ([], *batches):
            publisher.publish(*events)
        async with kv_service([publisher.described()]) as kv:
            await eventually(lambda: kv.counts().batches == 1 + len(batches), "all batches")
            subscription = await kv.subscribe(start_sequence_number=1)
            for each in await subscription.read(len(batches)):
                index.apply(7, each)
    return index


async def test_overlap_is_counted_in_tokens_from_the_start() -> None:
    index = await indexed([stored([1, 2, 3])])
    assert index.overlaps(prompt(1, 2, 3, 4)) == {(7, 0): 3 * BLOCK}
    assert index.overlaps(prompt(1, 2)[:-1]) == {(7, 0): BLOCK}
    assert index.overlaps(prompt(2, 3)) == {}
    assert index.overlaps([]) == {}
    assert index.block_size((7, 0)) == BLOCK


async def test_removals_and_clears_are_followed() -> None:
    index = await indexed([stored([1, 2, 3])], [removed([3])])
    assert index.overlaps(prompt(1, 2, 3)) == {(7, 0): 2 * BLOCK}
    index = await indexed([stored([1, 2, 3])], [CLEARED, stored([4])])
    assert index.overlaps(prompt(1, 2, 3)) == {}
    assert index.overlaps(prompt(4)) == {(7, 0): BLOCK}


async def test_salts_and_adapters_keep_prompts_apart() -> None:
    salted = stored([1, 2], extra_keys=[["grün"], None])
    adapted = stored([11, 12], tokens=prompt(1, 2), lora_name="ad", extra_keys=[["ad"], ["ad"]])
    both = stored(
        [21, 22], tokens=prompt(1, 2), lora_name="ad", extra_keys=[["ad", "grün"], ["ad"]]
    )
    expected = {("grün", ""): salted, ("", "ad"): adapted, ("grün", "ad"): both}
    others = [("", ""), ("red", ""), ("ad", ""), ("", "grün"), ("red", "ad")]
    for (salt, lora), event in expected.items():
        index = await indexed([event])
        for one in [*expected, *others]:
            found = index.overlaps(prompt(1, 2), cache_salt=one[0], lora_name=one[1])
            assert found == ({(7, 0): 2 * BLOCK} if one == (salt, lora) else {}), one


async def test_only_full_attention_on_the_accelerator_counts() -> None:
    index = await indexed(
        [
            stored([1], group_idx=1, kv_cache_spec_kind="sliding_window"),
            stored([3], group_idx=2),
            stored([2], group_idx=2, medium="CPU"),
            stored([3], group_idx=2, medium="CPU"),
            stored([4], group_idx=3),
        ],
        [removed([4], group_idx=3), removed([3], group_idx=2, medium="CPU")],
    )
    found = [bool(index.overlaps(prompt(value))) for value in (1, 2, 3, 4)]
    assert found == [False, False, True, False]


def test_hashes_of_any_form() -> None:
    index = PrefixIndex()
    message = batch(0, 1, 2)
    for value, block in enumerate(message.events[0].block_stored.block_hashes):
        block.CopyFrom(pb.KvBlockHash(value=bytes([value]) * 32, encoding="bytes"))
    index.apply(0, message)
    assert index.overlaps(prompt(1, 2)) == {(0, 0): 2 * BLOCK}
    with pytest.raises(OutOfStepError):
        index.apply(0, batch(1, 5, parent=99))


@asynccontextmanager
async def workers(count: int) -> AsyncIterator[list[ScriptedServer]]:
    """Servers whose subscriptions bring nothing and last."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(scripted_server()) for _ in range(count)]
        for number, server in enumerate(servers):
            introduce(server, f"instance-{number}")
            server.stream("SubscribeKvEvents", hold=True)
            server.stream("Generate", finished())
        yield servers


def engine_info(instance_id: str) -> pb.EngineInfo:
    return pb.EngineInfo(
        instance_id=instance_id,
        schema_revision=SCHEMA_REVISION,
        minimum_client_revision=SCHEMA_REVISION,
    )


def introduce(server: ScriptedServer, instance_id: str, ranks: int = 1) -> None:
    server.answer("GetEngineInfo", engine_info(instance_id))
    sources = pb.GetKvEventSourcesResponse()
    for rank in range(ranks):
        sources.sources.add(transport="grpc", encoding="protobuf", data_parallel_rank=rank)
        sources.sources.add(transport="zmq", encoding="msgpack", data_parallel_rank=rank)
    server.answer("GetKvEventSources", sources)


def finished() -> pb.GenerateResponse:
    end = pb.GenerationFinished(output_index=0, reason=pb.FINISH_REASON_LENGTH)
    return pb.GenerateResponse(finished=end, usage=pb.Usage(prompt_tokens=1))


def subscriptions(server: ScriptedServer) -> list[pb.SubscribeKvEventsRequest]:
    return [r for _, r in server.requests if isinstance(r, pb.SubscribeKvEventsRequest)]


def prompts(server: ScriptedServer) -> list[pb.GenerateRequest]:
    return [r for _, r in server.requests if isinstance(r, pb.GenerateRequest)]


def plays(server: ScriptedServer, *subscriptions: Sequence[pb.KvEventBatch]) -> None:
    """Each subscription brings its batches and breaks; the last one lasts."""
    left = list(subscriptions)

    async def script(request: object, context: Context) -> AsyncIterator[Any]:
        for each in left.pop(0):
            yield pb.SubscribeKvEventsResponse(batch=each)
        if left:
            error = errors.overloaded("too slow")
            yield pb.SubscribeKvEventsResponse(error=errors.to_proto(error))
        else:
            await asyncio.Event().wait()

    server.scripts["SubscribeKvEvents"] = script


def overlap(router: Router, *hashes: int) -> int:
    return sum(router.index.overlaps(prompt(*hashes)).values()) // BLOCK


async def test_a_broken_subscription_goes_on_with_the_next_number() -> None:
    async with workers(1) as [server]:
        plays(
            server,
            [batch(4, 1), batch(4, 2, parent=1), batch(5, 3, parent=2)],
            [batch(6, 4, parent=3)],
            [],
            [batch(7, 5, parent=4)],
        )
        async with Router([server.target]) as router:
            await eventually(lambda: overlap(router, 1, 2, 3, 4, 5) == 5, "all blocks")
        starts = [(s.start_sequence_number, s.include_snapshot) for s in subscriptions(server)]
        assert starts == [(0, True), (6, True), (7, True), (7, True)]


async def test_a_snapshot_in_place_of_the_next_batch_replaces_what_was_there() -> None:
    async with workers(1) as [server]:
        plays(server, [batch(4, 1)], [batch(9, 2), batch(9, 3, parent=2), batch(10, 4)])
        async with Router([server.target]) as router:
            await eventually(lambda: overlap(router, 4) == 1, "the last block")
            assert overlap(router, 1) == 0
            assert overlap(router, 2, 3) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        [batch(6, 3)],
        [batch(3, 3)],
        [batch(4, 3)],
        [batch(5, 3), batch(4, 4)],
        [batch(5, 3, parent=77)],
    ],
)
async def test_what_does_not_follow_is_not_believed(wrong: list[pb.KvEventBatch]) -> None:
    async with workers(1) as [server]:
        in_turn = [batch(3, 1), batch(4, 2)]
        plays(server, [*in_turn, *wrong], [batch(20, 9)])
        async with Router([server.target]) as router:
            await eventually(lambda: overlap(router, 9) == 1, "a snapshot")
            assert [overlap(router, value) for value in (1, 2, 3, 4)] == [0, 0, 0, 0]
        assert [s.start_sequence_number for s in subscriptions(server)] == [0, 0]


@pytest.mark.parametrize("first", [[], [batch(0, 2)]])
async def test_another_instance_begins_anew(first: list[pb.KvEventBatch]) -> None:
    async with workers(1) as [server]:
        plays(server, [batch(4, 1)], first)

        async def restarted(request: object, context: Context) -> pb.EngineInfo:
            return engine_info(f"instance-{len(subscriptions(server))}")

        server.scripts["GetEngineInfo"] = restarted
        async with Router([server.target]) as router:
            await eventually(lambda: len(subscriptions(server)) == 2, "the new one")
            await eventually(lambda: overlap(router, 1) == 0, "the old one's block is forgotten")
            await eventually(lambda: overlap(router, 2) == len(first), "the new one's block")
            assert router.choose(prompt(1)).overlap == 0
        assert [s.start_sequence_number for s in subscriptions(server)] == [0, 0]


async def test_a_worker_that_is_gone_is_out_until_it_is_back() -> None:
    async with publishers() as [publisher], workers(1) as [other]:
        publisher.publish(stored([1]))
        described = [publisher.described()]

        def start(instance_id: str, port: int) -> AbstractAsyncContextManager[LiveServer]:
            info = engine_info(instance_id)
            return live_server("--port", str(port), engine_info=info, kv_publishers=described)

        async with AsyncExitStack() as life:
            live = await life.enter_async_context(start("first", 0))
            async with Router([live.address, other.target]) as router:
                first, second = router.workers
                await eventually(lambda: overlap(router, 1) == 1, "the block")
                assert router.choose(prompt(1)).worker is first
                await life.aclose()
                await eventually(lambda: not first.up, "it is out")
                choice = router.choose(prompt(1))
                assert (choice.worker, choice.overlap) == (second, 0)
                publisher.publish(stored([2], parent=1))
                async with start("second", live.port):
                    await eventually(lambda: overlap(router, 1, 2) == 2, "it is back")
                    assert router.choose(prompt(1)).worker is first
                    assert first.problem is None


async def test_no_subscription_outlives_the_router() -> None:
    async with workers(2) as servers:
        for server in servers:
            introduce(server, "i", ranks=2)
        async with Router([server.target for server in servers]) as router:
            assert [worker.ranks for worker in router.workers] == [(0, 1), (0, 1)]
            for server in servers:
                await eventually(lambda s=server: len(subscriptions(s)) == 2, "two each")  # type: ignore[misc]
        for server in servers:
            await asyncio.wait_for(server.cancelled.wait(), 20)
        with pytest.raises(NoWorkerError):
            router.choose([1])
        for worker in router.workers:
            with pytest.raises(aio.UsageError, match="closed"):
                await worker.client.health()


async def test_the_longest_overlap_wins_and_then_the_least_load() -> None:
    async with workers(3) as servers:
        introduce(servers[2], "instance-2", ranks=2)
        plays(servers[1], [batch(0, 1, 2)])

        async def by_rank(
            request: pb.SubscribeKvEventsRequest, context: Context
        ) -> AsyncIterator[Any]:
            [rank] = request.data_parallel_ranks
            chain = (1, 2, 3) if rank else (1,)
            yield pb.SubscribeKvEventsResponse(batch=batch(0, *chain, rank=rank))
            await asyncio.Event().wait()

        servers[2].scripts["SubscribeKvEvents"] = by_rank
        async with Router([server.target for server in servers]) as router:
            await eventually(lambda: len(router.index.overlaps(prompt(1))) == 3, "all ranks")
            choice = router.choose(prompt(1, 2, 3, 4))
            assert (choice.worker.number, choice.rank, choice.overlap) == (2, 1, 3 * BLOCK)
            choice, _ = await router.complete(prompt(1, 2, 3, 4))
            [request] = prompts(servers[2])
            assert request.kv.data_parallel_rank == 1
            assert not prompts(servers[0])
            # Nobody has these: the third has been given one already.
            for expected in (0, 1, 0):
                choice = router.choose(prompt(50))
                assert (choice.worker.number, choice.rank, choice.overlap) == (expected, None, 0)
                choice.worker.sent += 1
            router.workers[0].in_flight += 1
            router.workers[1].in_flight += 1
            assert router.choose(prompt(50)).worker.number == 2


async def test_a_prompt_that_is_turned_away_goes_to_the_next_worker() -> None:
    async with workers(2) as servers:
        plays(servers[1], [batch(0, 1)])

        def refuse(server: ScriptedServer, error: OpenEngineError) -> None:
            async def script(request: object, context: Context) -> AsyncIterator[Any]:
                await context.abort(error.status, error.message, error.trailing_metadata())
                yield finished()

            server.scripts["Generate"] = script

        async with Router([server.target for server in servers]) as router:
            await eventually(lambda: overlap(router, 1) == 1, "the block")
            refuse(servers[1], errors.draining())
            choice, _ = await router.complete(prompt(1))
            assert choice.worker.number == 0
            refuse(servers[0], errors.overloaded("full"))
            with pytest.raises(OpenEngineError, match="full"):
                await router.complete(prompt(1))
            refuse(servers[1], errors.invalid_argument("sampling.top_p", "no"))
            with pytest.raises(OpenEngineError, match="no"):
                await router.complete(prompt(1))
            assert [len(prompts(server)) for server in servers] == [2, 3]
            assert [worker.in_flight for worker in router.workers] == [0, 0]


async def test_problems_are_named() -> None:
    async with (
        live_server(engine_info=engine_info("i")) as without_events,
        workers(1) as [server],
    ):
        async with Router([without_events.address, "127.0.0.1:1"]) as router:
            with pytest.raises(NoWorkerError) as caught:
                router.choose([1])
            assert f"{without_events.address}: it has no KV events" in str(caught.value)
            assert "127.0.0.1:1: UNAVAILABLE: " in str(caught.value)
        async with Router(["127.0.0.1:1", server.target]) as router:
            assert router.choose([1]).worker.number == 1


def test_the_program_names_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def run(*arguments: str) -> tuple[object, str]:
        monkeypatch.setattr("sys.argv", ["kv_router", *arguments])
        try:
            code: object = main()
        except SystemExit as exit_:
            code = exit_.code
        return code, capsys.readouterr().err

    two = ("--worker", "127.0.0.1:1", "--worker", "127.0.0.1:2", "--tokenizer")
    empty = tmp_path / "tokenizer.json"
    empty.write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    code, text = run("--worker", "127.0.0.1:1", "--tokenizer", str(empty))
    assert (code, "two workers" in text) == (2, True)
    code, text = run(*two, str(tmp_path / "none.json"))
    assert (code, "none.json cannot be read" in text) == (2, True)
    code, text = run(*two, str(empty))
    assert code == 1
    assert text.splitlines()[-1].startswith("error: worker 127.0.0.1:1: UNAVAILABLE: ")
