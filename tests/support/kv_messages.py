"""vLLM's KV event batches as a test writes them, and the contract's as a reader sees them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from openengine_vllm.protocol import v1 as pb

BLOCK = 4
"""Tokens in a block of these tests."""

Key = tuple[int, int, bytes]
"""Medium, group and hash value of a block."""


def stored(
    hashes: Sequence[int | bytes],
    parent: int | bytes | None = None,
    tokens: Sequence[int] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """A BlockStored as vLLM 0.32 writes it; the tokens follow from the hashes unless given."""
    if tokens is None:
        tokens = [token for value in hashes for token in tokens_of(value)]
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        **fields,
    }


def large(count: int) -> dict[str, Any]:
    """A chain of so many blocks with the hashes from 1 on, some 190 bytes of tokens each."""
    return stored(range(1, count + 1), tokens=[99_999] * (64 * count), block_size=64)


def tokens_of(value: int | bytes) -> list[int]:
    """The tokens of the block with this hash, in these tests."""
    number = value if isinstance(value, int) else int.from_bytes(value[-8:], "big")
    return [number % 150_000 + index for index in range(BLOCK)]


def removed(hashes: Sequence[int | bytes], **fields: Any) -> dict[str, Any]:
    """A BlockRemoved."""
    return {
        "type": "BlockRemoved",
        "block_hashes": list(hashes),
        "medium": "GPU",
        "group_idx": 0,
        **fields,
    }


CLEARED = {"type": "AllBlocksCleared"}


def payload(*events: Any, ts: float = 1.5, rank: int | None = 0) -> bytes:
    """A batch as it comes from the publisher."""
    return msgspec.msgpack.encode([ts, list(events), rank])


def parse(response: bytes) -> pb.KvEventBatch:
    """The batch in a serialised response."""
    message = pb.SubscribeKvEventsResponse.FromString(response)
    assert message.WhichOneof("event") == "batch"
    return message.batch


class BlockSet:
    """A reader that keeps a set, and takes offence at events that do not fit one."""

    def __init__(self) -> None:
        self.blocks: dict[Key, pb.BlockStored] = {}
        """The live blocks, each as a stored event of its own."""
        self.strict = True
        """Whether parents have to be there."""

    def apply(self, batch: pb.KvEventBatch) -> None:
        """Follow one batch.

        Raises:
            AssertionError: a block stored twice, removed but not there, or without its parent.
        """
        for event in batch.events:
            kind = event.WhichOneof("event")
            if kind == "block_stored":
                self._store(event.block_stored)
            elif kind == "block_removed":
                for block in event.block_removed.block_hashes:
                    place = event.block_removed.medium, event.block_removed.group_idx
                    del self.blocks[(*place, block.value)]
            else:
                assert kind == "all_blocks_cleared"
                self.blocks.clear()

    def _store(self, event: pb.BlockStored) -> None:
        size, count = event.block_size, len(event.block_hashes)
        assert len(event.token_ids) == size * count
        assert len(event.extra_keys) in (0, count)
        parent = event.parent_block_hash if event.HasField("parent_block_hash") else None
        for index, block in enumerate(event.block_hashes):
            key = (event.medium, event.group_idx, block.value)
            assert key not in self.blocks
            if self.strict and parent is not None:
                assert (event.medium, event.group_idx, parent.value) in self.blocks
            single = pb.BlockStored()
            single.CopyFrom(event)
            single.ClearField("block_hashes")
            single.ClearField("token_ids")
            single.ClearField("extra_keys")
            single.ClearField("parent_block_hash")
            single.block_hashes.append(block)
            single.token_ids.extend(event.token_ids[index * size : (index + 1) * size])
            if event.extra_keys:
                single.extra_keys.append(event.extra_keys[index])
            if parent is not None:
                single.parent_block_hash.CopyFrom(parent)
            self.blocks[key] = single
            parent = block


def block_set(batches: Iterable[pb.KvEventBatch]) -> BlockSet:
    """What a reader has after these batches."""
    reader = BlockSet()
    for batch in batches:
        reader.apply(batch)
    return reader
