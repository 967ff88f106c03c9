"""The least that must work on every vLLM that is supported: it runs on the oldest one as well."""

from __future__ import annotations

import os

import pytest
import vllm

from openengine_vllm.client import Client, OpenEngineError
from openengine_vllm.protocol import v1 as pb
from tests.support.models import model_dir
from tests.support.server import ENGINE_FLAGS, start_server

EXPECTED = os.environ.get("OPENENGINE_EXPECTED_VLLM")
"""vLLM's version, where a run is for one."""


async def test_a_live_engine_serves_streams_rejects_aborts_and_stops() -> None:
    model = str(model_dir("tiny_llama"))
    with start_server(
        "--model",
        model,
        "--port",
        "0",
        *ENGINE_FLAGS,
        warm=EXPECTED is None,
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    ) as server:
        async with Client(server.target) as client:
            health = await client.health(include_inference_probe=True)
            assert health.state == pb.HEALTH_STATE_READY
            info = await client.engine_info()
            assert info.engine_name == "vllm"
            assert info.engine_version == (EXPECTED or vllm.__version__)
            result = await client.complete(
                "Once upon", max_tokens=9, ignore_eos=True, num_sequences=2, seed=1
            )
            assert [len(output.token_ids) for output in result.outputs] == [9, 9]
            assert result.usage is not None
            assert result.usage.completion_tokens == 18
            repeated = await client.complete(
                "Once upon", max_tokens=9, ignore_eos=True, num_sequences=2, seed=1
            )
            assert [o.text for o in repeated.outputs] == [o.text for o in result.outputs]
            scored = await client.complete("Once upon", max_tokens=4, output_logprobs=3)
            for token in scored.outputs[0].tokens:
                assert token.HasField("logprob")
                assert [candidate.rank for candidate in token.candidates] == [1, 2, 3]
            guided = await client.complete("Once upon", max_tokens=9, regex="[ab]{3}")
            assert set(guided.outputs[0].text) <= {"a", "b"}
            assert len(guided.outputs[0].text) == 3
            with pytest.raises(OpenEngineError, match="temperature"):
                await client.complete("Once upon", temperature=-1.0)
            events = client.generate("Once", request_id="long", max_tokens=1000, ignore_eos=True)
            assert (await anext(events)).HasField("token")
            aborted = await client.abort("long")
            assert aborted.status == pb.ABORT_STATUS_ABORTED
            last = [event async for event in events][-1]
            assert last.finished.reason == pb.FINISH_REASON_CANCELLED
            assert last.HasField("usage")
        assert server.stop() == 0
