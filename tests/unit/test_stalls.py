"""Writes to clients that have gone."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from openengine_vllm.services.stalls import StallWatch


class Context:
    """Fails every write as gRPC does when the call ends in the middle of it."""

    async def write(self, message: bytes) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')


async def test_a_call_that_ends_in_a_write_is_a_cancellation() -> None:
    writer = StallWatch(60).open(cast("Any", Context()), "Generate")
    with pytest.raises(asyncio.CancelledError):
        await writer.write([b"x"])
    assert not writer.stalled
    writer.close()
