"""What the workers have cached, and how much of a prompt that is, by Dynamo's radix tree.

The tree knows blocks by two numbers: the engine's own hash, by which they are removed and found
as parents, and a hash of the tokens, by which a prompt's blocks are looked up on a path from the
root. A block that was computed under a cache salt or an adapter has that in its second number, as
the engine has it in its hash, and so lies on a path that other prompts don't take.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Any, cast

from dynamo.llm import RadixTree, compute_block_hash_for_seq

from openengine_vllm.protocol import v1 as pb

Place = tuple[int, int]
"""A worker's number and one of its data-parallel ranks: what has a cache of its own."""

_FULL_ATTENTION = ("", "full_attention")


class OutOfStepError(Exception):
    """An event that can't follow from those before it."""


class PrefixIndex:
    """The blocks in the accelerators' memory, of one group of full attention a place.

    Other media and other groups are left out: their blocks are none that a prompt can start on
    without more work.
    """

    def __init__(self) -> None:
        self._tree = RadixTree()
        self._event_ids = itertools.count()
        self._groups: dict[Place, tuple[int, int]] = {}
        """Each place's group, and the tokens in one of its blocks, from the first event on."""

    def apply(self, worker: int, batch: pb.KvEventBatch) -> None:
        """Follow a batch.

        Raises:
            OutOfStepError: it stores a block whose parent isn't there, or removes one that isn't.
        """
        place = (worker, batch.data_parallel_rank)
        for event in batch.events:
            match event.WhichOneof("event"):
                case "block_stored" if self._counts(place, event.block_stored):
                    self._apply(place, {"stored": _stored(event.block_stored)})
                case "block_removed" if self._has(place, event.block_removed):
                    hashes = list(map(_external_hash, event.block_removed.block_hashes))
                    self._apply(place, {"removed": {"block_hashes": hashes}})
                case "all_blocks_cleared":
                    self.clear(place)

    def clear(self, place: Place) -> None:
        """Forget one place's blocks."""
        self._apply(place, "cleared")

    def remove(self, worker: int) -> None:
        """Forget a worker."""
        self._tree.remove_worker(worker)
        for place in [place for place in self._groups if place[0] == worker]:
            del self._groups[place]

    def block_size(self, place: Place) -> int | None:
        """Tokens in a block; None before the place's first one."""
        return self._groups[place][1] if place in self._groups else None

    def overlaps(
        self, token_ids: Sequence[int], *, cache_salt: str = "", lora_name: str = ""
    ) -> dict[Place, int]:
        """How many tokens of a prompt each place has cached, from its start, where it has any.

        An engine reuses at most these: it computes a prompt's last token anew in any case, and
        with it the block that this one is in.
        """
        found: dict[Place, int] = {}
        for size in {size for _, size in self._groups.values()}:
            blocks = _prompt_hashes(token_ids, size, cache_salt, lora_name)
            # The stub says that the keys are workers alone.
            scores = cast("dict[Place, int]", self._tree.find_matches(blocks).scores)
            found |= {place: count * size for place, count in scores.items()}
        return found

    def _counts(self, place: Place, event: pb.BlockStored) -> bool:
        if event.kv_cache_spec_kind not in _FULL_ATTENTION or not event.block_size:
            return False
        if event.medium == pb.STORAGE_MEDIUM_GPU:
            self._groups.setdefault(place, (event.group_idx, event.block_size))
        return self._has(place, event)

    def _has(self, place: Place, event: pb.BlockStored | pb.BlockRemoved) -> bool:
        group = self._groups.get(place)
        return (
            group is not None
            and event.medium == pb.STORAGE_MEDIUM_GPU
            and event.group_idx == group[0]
        )

    def _apply(self, place: Place, data: object) -> None:
        worker, rank = place
        event = {"event_id": next(self._event_ids), "dp_rank": rank, "data": data}
        try:
            self._tree.apply_event(worker, json.dumps(event).encode())
        except RuntimeError as error:
            raise OutOfStepError(str(error)) from error


def _stored(event: pb.BlockStored) -> dict[str, Any]:
    keys = [_namespace(keys.values) for keys in event.extra_keys]
    namespaces = keys or [""] * len(event.block_hashes)
    tokens_hashes = _local_hashes(event.token_ids, event.block_size, namespaces, event.lora_name)
    has_parent = event.HasField("parent_block_hash")
    return {
        "parent_hash": _external_hash(event.parent_block_hash) if has_parent else None,
        "blocks": [
            {"block_hash": _external_hash(block), "tokens_hash": tokens_hash}
            for block, tokens_hash in zip(event.block_hashes, tokens_hashes, strict=True)
        ],
    }


def _prompt_hashes(
    token_ids: Sequence[int], size: int, cache_salt: str, lora_name: str
) -> list[int]:
    """As the engine would store them: the adapter with each block, the salt with the first."""
    keys = [_extra_key(lora_name)] if lora_name else []
    first = [*keys, _extra_key(cache_salt)] if cache_salt else keys
    count = len(token_ids) // size
    namespaces = [_namespace(first), *[_namespace(keys)] * (count - 1)][:count]
    return _local_hashes(token_ids, size, namespaces, lora_name)


def _extra_key(text: str) -> str:
    """A key as events have it."""
    return json.dumps(text, ensure_ascii=False)


def _namespace(keys: Sequence[str]) -> str:
    """A block's extra keys as Dynamo takes them; empty for none."""
    return json.dumps(list(keys)) if keys else ""


def _local_hashes(
    token_ids: Sequence[int], size: int, namespaces: Sequence[str], lora_name: str
) -> list[int]:
    """The hashes of the blocks' tokens, one for each namespace."""
    hashes: list[int] = []
    for namespace, run in itertools.groupby(namespaces):
        start = len(hashes) * size
        tokens = list(token_ids[start : start + len(list(run)) * size])
        hashes += compute_block_hash_for_seq(
            tokens, size, lora_name=lora_name or None, cache_namespace=namespace or None
        )
    return hashes


def _external_hash(block: pb.KvBlockHash) -> int:
    """The engine's hash as the unsigned 64 bits that Dynamo takes."""
    value = block.value
    if block.encoding != "int64":
        value = hashlib.blake2b(value, digest_size=8).digest()
    return int.from_bytes(value, "big")
