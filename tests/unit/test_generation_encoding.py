"""Events put together from parts, against the generated classes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openengine_vllm.limits import MIB
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.generation_encoding import GenerationEncoder, token_info

texts = st.text("a€😀\x00", max_size=100)
token_ids = st.integers(0, 2**32 - 1)
indexes = st.sampled_from([0, 1, 127, 128, 2**32 - 1])
tokens = st.tuples(token_ids, texts, texts)
scored = st.builds(
    lambda token_id, text, scores: pb.TokenInfo(
        token_id=token_id,
        token=text,
        logprob=-1.5,
        rank=3,
        candidates=[
            pb.LogProb(token_id=one, logprob=-0.25, token=text, rank=rank)
            for rank, one in enumerate(scores, 1)
        ],
    ),
    token_ids,
    texts,
    st.lists(token_ids, max_size=20),
)


def parse(events: list[bytes]) -> list[pb.GenerateResponse]:
    return [pb.GenerateResponse.FromString(event) for event in events]


@given(st.text(max_size=20), indexes, token_ids, texts, texts)
def test_a_token(request_id: str, index: int, token_id: int, piece: str, text: str) -> None:
    event = GenerationEncoder(request_id, MIB).token(index, token_id, piece, text)

    assert pb.GenerateResponse.FromString(event) == pb.GenerateResponse(
        request_id=request_id,
        token=pb.TokenOutput(
            output_index=index, tokens=[pb.TokenInfo(token_id=token_id, token=piece)], text=text
        ),
    )


@given(indexes, st.lists(tokens, min_size=1, max_size=10))
def test_tokens_are_one_event_while_they_fit(
    index: int, records: list[tuple[int, str, str]]
) -> None:
    events = GenerationEncoder("r", MIB).tokens(
        index, [(token_info(token_id, piece), text) for token_id, piece, text in records]
    )

    assert parse(events) == [
        pb.GenerateResponse(
            request_id="r",
            token=pb.TokenOutput(
                output_index=index,
                tokens=[pb.TokenInfo(token_id=one, token=piece) for one, piece, _ in records],
                text="".join(text for *_, text in records),
            ),
        )
    ]


def test_no_tokens_are_no_event() -> None:
    assert GenerationEncoder("r", MIB).tokens(0, []) == []


@given(
    st.text(max_size=50),
    indexes,
    st.lists(st.tuples(scored, texts), min_size=1, max_size=20),
    st.integers(100, 3000),
)
def test_events_keep_to_their_limit(
    request_id: str, index: int, records: list[tuple[pb.TokenInfo, str]], most_bytes: int
) -> None:
    """All records in order, each with its text; over the limit goes a single record at most."""
    events = GenerationEncoder(request_id, most_bytes).tokens(
        index, [(record.SerializeToString(), text) for record, text in records]
    )
    left = list(records)

    for event, parsed in zip(events, parse(events), strict=True):
        output = parsed.token
        here, left = left[: len(output.tokens)], left[len(output.tokens) :]
        assert parsed.request_id == request_id
        assert output.output_index == index
        assert list(output.tokens) == [record for record, _ in here]
        assert output.text == "".join(text for _, text in here)
        assert len(event) <= most_bytes or len(here) == 1
    assert not left


def test_no_more_events_than_needed() -> None:
    record = pb.TokenInfo(token_id=1, token="x" * 100).SerializeToString()
    events = GenerationEncoder("r", 1000).tokens(0, [(record, "x" * 100)] * 9)

    assert [len(event.token.tokens) for event in parse(events)] == [4, 4, 1]


@given(st.text(max_size=20), st.lists(scored, max_size=10))
def test_a_prompt(request_id: str, records: list[pb.TokenInfo]) -> None:
    event = GenerationEncoder(request_id, MIB).prompt(
        record.SerializeToString() for record in records
    )
    parsed = pb.GenerateResponse.FromString(event)

    assert parsed.WhichOneof("event") == "prompt"
    assert parsed == pb.GenerateResponse(
        request_id=request_id, prompt=pb.PromptOutput(tokens=records)
    )


@pytest.mark.parametrize("length", [63, 64, 65])
def test_kept_and_long_pieces_look_the_same(length: int) -> None:
    piece = "€" * length
    encoder = GenerationEncoder("r", MIB)

    assert [encoder.token(2, 5, piece, piece)] == encoder.tokens(2, [(token_info(5, piece), piece)])
