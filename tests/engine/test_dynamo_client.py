"""Dynamo's own client on a live server: it registers, and what it is sent is generated here.

How far it gets: of Control it asks for GetModelInfo when it starts and for Abort when a request
is dropped, of Inference for Generate; it asks for no health, load or KV events. It calls the
model by the path that it has the tokenizer from, so the server has to serve it under that name.
What it can't do is its own: it knows TensorRT-LLM's server, and refuses what that has not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from openengine_vllm.client import GenerateOptions
from tests.engine.peers import Peer
from tests.engine.test_load import idle
from tests.support.calls import ENDLESS_TOKENS, eventually
from tests.support.dynamo import Dynamo, dynamo
from tests.support.log_lines import request_lines
from tests.support.models import model_dir

PROMPT = list(range(10, 50))
TOKENS = 24


def asked(**parts: Any) -> dict[str, Any]:
    """A request as Dynamo's frontend sends it to a worker: greedy, unless a part says otherwise."""
    request: dict[str, Any] = {
        "token_ids": PROMPT,
        "model": "any",
        "stop_conditions": {"max_tokens": TOKENS, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "output_options": {},
        "eos_token_ids": [],
        "annotations": [],
    }
    for name, value in parts.items():
        merge = isinstance(value, dict) and name in request
        request[name] = {**request[name], **value} if merge else value
    return request


def tokens(items: list[dict[str, Any]]) -> list[int]:
    return [token for item in items for token in item["token_ids"]]


def outcomes(peer: Peer, request_id: str) -> list[str]:
    """What the access log says of a request."""
    lines = request_lines(peer.server.stderr())
    return [line["outcome"] for line in lines if line["request_id"] == request_id]


@pytest.fixture
async def client(operated: Peer, tmp_path: Path) -> AsyncIterator[Dynamo]:
    """Both of its processes, registered."""
    async with dynamo(operated.server.target, model_dir("tiny_llama"), tmp_path) as running:
        yield running


SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "top_p": 0.9, "presence_penalty": 0.5}


@pytest.mark.parametrize(
    ("name", "parts", "options"),
    [
        ("greedy", {}, {"temperature": 0.0}),
        ("seeded", {"sampling_options": SAMPLED}, SAMPLED),
        (
            "stop",
            {"stop_conditions": {"stop_token_ids": list(range(300, 500))}},
            {"temperature": 0.0, "stop_token_ids": range(300, 500)},
        ),
        (
            "guided",
            {"sampling_options": {"guided_decoding": {"regex": "(fox|dog){20}"}}},
            {"temperature": 0.0, "regex": "(fox|dog){20}"},
        ),
    ],
)
async def test_its_tokens_are_those_of_generate(
    client: Dynamo, operated: Peer, name: str, parts: dict[str, Any], options: dict[str, Any]
) -> None:
    request_id = f"dynamo-{name}"
    items, error = await client.caller.run(request_id, asked(**parts))
    assert error is None
    given = cast("GenerateOptions", {"max_tokens": TOKENS, "ignore_eos": True, **options})
    direct = await operated.generate(PROMPT, **given)
    assert tokens(items) == direct.only.token_ids
    assert items[-1]["finish_reason"] == ("stop" if name == "stop" else "length")
    assert items[-1]["completion_usage"]["prompt_tokens"] == len(PROMPT)
    assert items[-1]["completion_usage"]["completion_tokens"] >= len(tokens(items))
    # It leaves once it has the last event, which may be before the status comes.
    await eventually(lambda: len(outcomes(operated, request_id)) == 1, "it has ended")


async def test_scores(client: Dynamo, operated: Peer) -> None:
    items, error = await client.caller.run("dynamo-scores", asked(output_options={"logprobs": 3}))
    assert error is None
    direct = await operated.generate(
        PROMPT, max_tokens=TOKENS, ignore_eos=True, temperature=0.0, output_logprobs=3
    )
    scores = [score for item in items for score in item["log_probs"] or ()]
    best = [row for item in items for row in item["top_logprobs"] or ()]
    assert scores == [record.logprob for record in direct.only.records]
    assert [[c["token_id"] for c in row] for row in best] == [
        [c.token_id for c in record.candidates] for record in direct.only.records
    ]


async def test_a_dropped_request_leaves_the_engine_idle(client: Dynamo, operated: Peer) -> None:
    endless = asked(stop_conditions={"max_tokens": ENDLESS_TOKENS})
    items, error = await client.caller.run("dynamo-dropped", endless, items=5)
    assert error is None
    assert len(tokens(items)) >= 5
    await eventually(lambda: idle(operated), "idle")
    await eventually(
        lambda: outcomes(operated, "dynamo-dropped") == ["cancelled"], "it was cancelled"
    )
    # The same worker goes on.
    items, error = await client.caller.run("dynamo-next", asked())
    assert error is None
    assert len(tokens(items)) == TOKENS


@pytest.mark.parametrize("who", ["caller", "sidecar"])
async def test_a_death_leaves_the_engine_idle(client: Dynamo, operated: Peer, who: str) -> None:
    request_id = f"dynamo-death-{who}"
    client.caller.send(request_id, asked(stop_conditions={"max_tokens": ENDLESS_TOKENS}))
    await client.caller.read()
    (client.sidecar if who == "sidecar" else client.caller.process).kill()
    await eventually(lambda: idle(operated), "idle")
    await eventually(lambda: outcomes(operated, request_id) == ["cancelled"], "it was cancelled")


async def test_a_refusal_reaches_its_caller(client: Dynamo, operated: Peer) -> None:
    items, error = await client.caller.run(
        "dynamo-hot", asked(sampling_options={"temperature": 5.0})
    )
    assert items == []
    assert "sampling.temperature is 5" in str(error)
    assert outcomes(operated, "dynamo-hot") == ["rejected"]


@pytest.mark.parametrize(
    "parts",
    [
        {"sampling_options": {"n": 2}},
        {"sampling_options": {"guided_decoding": {"choice": ["fox"]}}},
        {"routing": {"priority": 1}},
        {"routing": {"lora_name": "adapter"}},
        {"output_options": {"prompt_logprobs": 1}},
    ],
    ids=["n", "choice", "priority", "adapter", "prompt scores"],
)
async def test_what_it_refuses_by_itself(
    client: Dynamo, operated: Peer, parts: dict[str, Any]
) -> None:
    items, error = await client.caller.run("dynamo-own", asked(**parts))
    assert items == []
    assert "n must be 1" in str(error) or "not supported by the TensorRT-LLM" in str(error)
    assert outcomes(operated, "dynamo-own") == []


async def test_all_of_it_listens_on_this_machine_alone(client: Dynamo) -> None:
    assert {host for host, _ in client.addresses()} == {"127.0.0.1"}
