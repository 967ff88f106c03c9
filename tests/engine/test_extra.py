"""``extra`` of the split revision on a live server: it does what it does in vLLM, and no harm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from google.rpc import status_pb2
from grpc import StatusCode, aio
from tokenizers import Tokenizer

from openengine_vllm.client import GenerateOptions, generate_request
from openengine_vllm.client.requests import Prompt
from openengine_vllm.engine.extra import EXTRA_KEYS
from openengine_vllm.protocol import split
from openengine_vllm.protocol.errors import STATUS_DETAILS_KEY
from openengine_vllm.protocol.split.service_pb2_grpc import InferenceStub
from openengine_vllm.protocol.translation import copy_shared
from tests.engine.cases import EXTRA, Case
from tests.engine.peers import Peer
from tests.engine.rejections import CONTEXT
from tests.engine.test_equality import expected
from tests.engine.test_rejections import assert_no_traceback, assert_unharmed
from tests.support.calls import PATIENCE_SECONDS
from tests.support.field_client import Answer, read_stream
from tests.support.models import EOS_ID, SPECIAL_TOKENS, VOCAB_SIZE
from tests.unit.test_extra import REFUSED

# The first test may wait for the reference's engine, and for ours after it.
pytestmark = pytest.mark.timeout(900)

PROMPT = list(range(30, 45))
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def asked(prompt: Prompt, options: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:
    """A request of the split revision."""
    request = split.GenerateRequest()
    copy_shared(generate_request(prompt, cast("GenerateOptions", dict(options))), request)
    request.extra.update(extra)
    return request


async def send(peer: Peer, request: split.GenerateRequest) -> Answer:
    """Its answer, which has to keep the rules of a stream."""
    call = InferenceStub(peer.channel).Generate(request, timeout=PATIENCE_SECONDS)
    return await read_stream(call, request)


async def run(peer: Peer, prompt: Prompt = PROMPT, **fields: Any) -> Answer:
    """The same for options and keys of ``extra`` together."""
    extra = {key: fields.pop(key) for key in EXTRA_KEYS if key in fields}
    return await send(peer, asked(prompt, {**GREEDY, **fields}, extra))


async def refusal(peer: Peer, request: split.GenerateRequest) -> split.EngineError:
    """The detail of a refusal; the contract's clients never see one of these."""
    with pytest.raises(aio.AioRpcError) as caught:
        await send(peer, request)
    assert caught.value.code() is StatusCode.INVALID_ARGUMENT
    trailers = dict(caught.value.trailing_metadata() or ())
    error = split.EngineError()
    assert status_pb2.Status.FromString(trailers[STATUS_DETAILS_KEY]).details[0].Unpack(error)
    assert not len(UnknownFieldSet(error))
    assert_no_traceback(error.message)
    return error


@pytest.mark.parametrize("case", EXTRA, ids=lambda case: case.name)
async def test_extra_equals_vllm(
    case: Case, reference: dict[str, Any], tiny: Peer, tiny_tokenizer: Tokenizer
) -> None:
    answer = reference["answers"][case.name]
    got = await run(tiny, case.prompt_for(tiny_tokenizer), **answer["options"])
    assert len(got.outputs) == len(answer["outputs"])
    for index, wanted in enumerate(answer["outputs"]):
        output = got.outputs[index]
        same = expected(wanted, answer["options"], tiny_tokenizer)
        assert output.token_ids == same.token_ids
        assert output.text == same.text


async def test_what_the_keys_do(
    reference: dict[str, Any], tiny: Peer, tiny_tokenizer: Tokenizer
) -> None:
    """The reference's answers, and with them ours, are no coincidence."""

    def answer(name: str) -> dict[str, Any]:
        return dict(reference["answers"][f"extra-{name}"]["outputs"][0])

    assert set(answer("bias-forces")["token_ids"]) == {300}
    assert min(answer("bias-bans")["token_ids"]) >= 400
    assert set(answer("allowed")["token_ids"]) <= {40, 41, 300, 1023}
    shown, skipped = answer("special-shown"), answer("special-skipped")
    assert shown["token_ids"] == skipped["token_ids"]
    assert any(text in shown["text"] for text in SPECIAL_TOKENS)
    assert not any(text in skipped["text"] for text in SPECIAL_TOKENS)
    for name in ("bad-words", "bad-words-seeded"):
        banned = reference["answers"][f"extra-{name}"]["options"]["bad_words"]
        assert len(banned) > 3
        tokens = answer(name)["token_ids"]
        for word in banned:
            ids = tiny_tokenizer.encode(word, add_special_tokens=False).ids
            assert all(tokens[at : at + len(ids)] != ids for at in range(len(tokens)))


async def test_the_end_s_own_token_is_never_shown(tiny: Peer) -> None:
    answer = await run(
        tiny, ignore_eos=False, logit_bias={str(EOS_ID): 100}, skip_special_tokens=False
    )
    assert answer.only.reason == split.FINISH_REASON_STOP
    assert answer.only.text == ""


@pytest.mark.parametrize("keep", [1, 5, CONTEXT - 8, CONTEXT - 1, -1])
async def test_a_prompt_is_cut_to_its_end(tiny: Peer, tiny_tokenizer: Tokenizer, keep: int) -> None:
    """Text and ids, shorter and longer than the context: as if only the end had been sent."""
    text = "The quick brown fox jumps over the lazy dog. " * 400
    long_ids = [7 + 31 * i % (VOCAB_SIZE - 7) for i in range(3 * CONTEXT)]
    kept = CONTEXT - 1 if keep == -1 else keep
    for prompt, ids in ((text, tiny_tokenizer.encode(text).ids), (long_ids, long_ids)):
        assert len(ids) > CONTEXT
        cut = await run(tiny, prompt, truncate_prompt_tokens=keep)
        direct = await run(tiny, ids[-kept:])
        assert cut.usage.prompt_tokens == direct.usage.prompt_tokens == kept
        assert cut.only == direct.only
    short = await run(tiny, PROMPT, truncate_prompt_tokens=keep)
    assert short.usage.prompt_tokens == min(kept, len(PROMPT))


async def test_without_the_key_a_long_prompt_is_refused(tiny: Peer) -> None:
    for prompt in ("fox " * 5000, [9] * CONTEXT):
        error = await refusal(tiny, asked(prompt, GREEDY, {}))
        assert error.code == split.ERROR_CODE_INVALID_ARGUMENT
        assert "context" in error.message


async def test_with_all_the_contract_has(tiny: Peer) -> None:
    """Outputs, scores, stops and guides beside keys of ``extra``."""
    several = await run(
        tiny,
        temperature=1.0,
        seed=4,
        num_sequences=4,
        output_logprobs=3,
        logit_bias={"300": 5},
        allowed_token_ids=[300, 301, 302, 303],
    )
    assert {token for o in several.outputs.values() for token in o.token_ids} <= set(
        range(300, 304)
    )
    assert all(len(output.logprobs) == 8 for output in several.outputs.values())
    stopped = await run(tiny, stop_token_ids=[300], logit_bias={"300": 100})
    assert stopped.only.reason == split.FINISH_REASON_STOP
    assert stopped.only.token_ids == []
    shown = await run(
        tiny, stop=[SPECIAL_TOKENS[3]], logit_bias={"3": 100}, skip_special_tokens=False
    )
    assert (shown.only.reason, shown.only.text) == (split.FINISH_REASON_STOP, "")
    guided = await run(
        tiny,
        choices=["fox", "dog"],
        ignore_eos=False,
        logit_bias=dict.fromkeys(map(str, range(VOCAB_SIZE)), -100),
    )
    assert guided.only.text in {"fox", "dog"}


async def test_values_that_are_refused(tiny: Peer) -> None:
    for key, value in REFUSED:
        if value == 1000 or value == [1000] or value == {"1000": 1}:
            continue  # within this model's limits
        error = await refusal(tiny, asked(PROMPT, GREEDY, {key: value}))
        assert error.code in (
            split.ERROR_CODE_INVALID_ARGUMENT,
            split.ERROR_CODE_UNSUPPORTED_FEATURE,
        )
        assert f"extra.{key}" in error.message
        assert await tiny.is_ready()
    await assert_unharmed(tiny)


WORDS = [f"{number:04x}x" for number in range(64)]
HARMLESS: dict[str, dict[str, Any]] = {
    "largest bias": {"logit_bias": {str(i): 100 - 200 * (i % 2) for i in range(VOCAB_SIZE)}},
    "nothing but bans": {"logit_bias": dict.fromkeys(map(str, range(VOCAB_SIZE)), -100)},
    "largest list": {"allowed_token_ids": [i % VOCAB_SIZE for i in range(1024)]},
    "one id over and over": {"allowed_token_ids": [5] * 1024},
    "largest bans": {"bad_words": WORDS},
    "one long ban": {"bad_words": ["é" * 200]},
    "bans of control characters": {"bad_words": ["\x00", "\ud7ff\uffff", "\u200b"]},
    "no token is left": {
        "allowed_token_ids": [EOS_ID],
        "min_tokens": 4,
        "ignore_eos": False,
        "temperature": 1.0,
        "output_logprobs": 5,
    },
    "no token is left, greedy": {
        "allowed_token_ids": [EOS_ID],
        "min_tokens": 4,
        "ignore_eos": False,
        "output_logprobs": 5,
    },
}


NO_TOKEN_LEFT: list[dict[str, Any]] = [
    {"allowed_token_ids": [7], "bad_words": ["!"]},
    {"allowed_token_ids": [300], "stop_token_ids": [300], "min_tokens": 4},
]


@pytest.mark.parametrize("options", NO_TOKEN_LEFT)
async def test_masks_that_leave_no_token_are_refused(tiny: Peer, options: dict[str, Any]) -> None:
    extra = {key: value for key, value in options.items() if key in EXTRA_KEYS}
    contract = {key: value for key, value in options.items() if key not in extra}
    error = await refusal(tiny, asked(PROMPT, {**GREEDY, **contract}, extra))
    assert error.code == split.ERROR_CODE_INVALID_ARGUMENT
    assert await tiny.is_ready()


@pytest.mark.parametrize("name", HARMLESS)
async def test_values_that_are_odd(tiny: Peer, name: str) -> None:
    """Beside others, which go on as if they were alone."""
    alone = await run(tiny)
    answer = await run(tiny, **HARMLESS[name])
    assert len(answer.only.token_ids) <= 8
    assert await tiny.is_ready()
    assert (await run(tiny)).only == alone.only


async def test_what_is_not_known_is_ignored(tiny: Peer) -> None:
    plain = (await run(tiny)).only
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    for extra in (
        {"detokenize": False},
        {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}},
        {"kv_transfer_params": {"do_remote_decode": True}, "priority": -5, "n": 1e9},
        {"logprobs": -1, "prompt_logprobs": -1, "max_tokens": 0, "stop": [""], "seed": -1},
        {"structured_outputs": {"regex": "("}, "guided_regex": "(", "output_kind": 2},
        {"skip_reading_prefix_cache": "yes", "trace_decode_token_ids": [-1]},
        {"": None, "Logit_bias": 5, "deep": deep, "large": "x" * 200_000},
    ):
        assert (await send(tiny, asked(PROMPT, GREEDY, extra))).only == plain
        assert await tiny.is_ready()
