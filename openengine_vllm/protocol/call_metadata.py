"""What the contract lets travel beside a request, as gRPC metadata of the call.

Both revisions of the schema know these keys, and in the later one they are the only way to say
these things. Here they may repeat what the request's body says, never contradict it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb

PRIORITY_KEY: Final = "openengine-priority"
RANK_KEY: Final = "openengine-target-dp-rank"
ROUTING_KEY: Final = "openengine-routing-key"
TOLD_RANK_KEY: Final = "openengine-dp-rank"
"""Of an answer, at once: the rank that was asked for and is used."""
_KEYS: Final = frozenset((PRIORITY_KEY, RANK_KEY, ROUTING_KEY))

MAX_ROUTING_KEY_LENGTH: Final = 256
"""Characters in a routing key."""

_DIGITS = re.compile(r"-?[0-9]{1,10}", re.ASCII)


@dataclass(frozen=True, slots=True)
class CallMetadata:
    """What the ``openengine-`` keys of one call say; None for what they leave out."""

    priority: int | None = None
    """An int32: larger is sooner."""
    data_parallel_rank: int | None = None
    """An uint32."""
    routing_key: str | None = None
    """What a router chose this server by: opaque, printable."""


def read_call_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> CallMetadata:
    """Read the known keys; all others are ignored, unknown ``openengine-`` ones as well.

    Raises:
        OpenEngineError: INVALID_ARGUMENT for a known key that is malformed, empty or repeated.
    """
    found: dict[str, str | bytes] = {}
    for key, value in metadata:
        if key in _KEYS:
            if key in found:
                raise _invalid(key, "must not be repeated")
            found[key] = value
    if not found:
        return _NOTHING
    return CallMetadata(
        priority=_integer(found, PRIORITY_KEY, -(2**31), 2**31 - 1),
        data_parallel_rank=_integer(found, RANK_KEY, 0, 2**32 - 1),
        routing_key=_routing_key(found),
    )


def agreed(key: str, value: int | None, body: int | None, body_path: str) -> int | None:
    """What metadata and body say together: either, or both when they are equal.

    Raises:
        OpenEngineError: INVALID_ARGUMENT when they differ.
    """
    if value is None or body is None or value == body:
        return body if value is None else value
    raise _invalid(key, f"is {value}, but {body_path} of the request is {body}")


def add_to_generate(request: pb.GenerateRequest, metadata: CallMetadata) -> None:
    """Put into a request's own fields what its metadata says.

    Raises:
        OpenEngineError: INVALID_ARGUMENT when the two contradict each other.
    """
    in_body = request.priority if request.HasField("priority") else None
    priority = agreed(PRIORITY_KEY, metadata.priority, in_body, "priority")
    if priority is not None:
        request.priority = priority
    if metadata.data_parallel_rank is None:
        return
    kv = request.kv
    if kv.HasField("session"):
        session_rank = kv.session.dp_rank
        agreed(RANK_KEY, metadata.data_parallel_rank, session_rank, "kv.session.dp_rank")
    in_body = kv.data_parallel_rank if kv.HasField("data_parallel_rank") else None
    rank = agreed(RANK_KEY, metadata.data_parallel_rank, in_body, "kv.data_parallel_rank")
    if rank is not None:
        kv.data_parallel_rank = rank


_NOTHING = CallMetadata()


def _integer(found: dict[str, str | bytes], key: str, low: int, high: int) -> int | None:
    text = found.get(key)
    if text is None:
        return None
    if isinstance(text, str) and _DIGITS.fullmatch(text) and low <= int(text) <= high:
        return int(text)
    raise _invalid(key, f"must be a decimal number from {low} to {high}")


def _routing_key(found: dict[str, str | bytes]) -> str | None:
    text = found.get(ROUTING_KEY)
    if text is None:
        return None
    if isinstance(text, str) and 0 < len(text) <= MAX_ROUTING_KEY_LENGTH and text.isprintable():
        return text
    raise _invalid(ROUTING_KEY, f"takes 1 to {MAX_ROUTING_KEY_LENGTH} printable characters")


def _invalid(key: str, message: str) -> errors.OpenEngineError:
    path = f"metadata[{key}]"
    return errors.invalid_argument(path, f"{path} {message}")
