"""KV events for clients of the split revision, which tell blocks by tokens and adapter alone.

Hashes are signed decimal numbers, and what such a client has no place for is left out: blocks
of other media than GPU and of other groups than the first one of full attention, and blocks whose
hash holds more than tokens and adapter (a salt, media), which it would take for plain ones.
"""

from __future__ import annotations

from collections.abc import Collection

from openengine_vllm.kv_events import wire
from openengine_vllm.kv_events.mirror import Mirror
from openengine_vllm.kv_events.retained import RetainedBatches
from openengine_vllm.protocol import v1 as pb

_ENCODING = "decimal_int64"
_INT64_BYTES = 8
_KEPT = 256
"""Batches that are made once for all who read them."""


class PlainForm:
    """One rank's batches in that form, made when they are first asked for.

    Args:
        log: what all readers get.
        mirror: of the same rank.
    """

    def __init__(self, log: RetainedBatches, mirror: Mirror) -> None:
        self._log = log
        self._mirror = mirror
        self._made: dict[int, bytes] = {}

    def batch(self, number: int, response: bytes) -> bytes:
        """The batch of this number, of which ``response`` is the full form."""
        made = self._made.get(number)
        if made is None:
            made = self.reduced(response, self._log.keyed(number))
            self._made[number] = made
            if len(self._made) > _KEPT:
                del self._made[next(iter(self._made))]
        return made

    def reduced(self, response: bytes, keyed: Collection[bytes]) -> bytes:
        """A SubscribeKvEventsResponse with a batch, in that form.

        A batch of which nothing is left keeps its number.

        Args:
            keyed: of its blocks those to leave out.
        """
        message = pb.SubscribeKvEventsResponse.FromString(response)
        batch, group = message.batch, self._mirror.full_group
        events = [event for event in batch.events if _reduce(event, keyed, group)]
        if len(events) < len(batch.events):
            del batch.events[:]
            batch.events.extend(events)
        return message.SerializeToString()


def _reduce(event: pb.KvEvent, keyed: Collection[bytes], group: int) -> bool:
    """Bring an event into the form; false when nothing is left of it."""
    kind = event.WhichOneof("event")
    if kind == "block_stored":
        stored = event.block_stored
        if not _is_told(stored.medium, stored.group_idx, group):
            return False
        # What follows a block that is left out is left out as well.
        kept = _count_plain(stored, keyed)
        if not kept:
            return False
        del stored.block_hashes[kept:]
        del stored.token_ids[kept * stored.block_size :]
        stored.ClearField("extra_keys")
        stored.ClearField("kv_cache_spec_kind")
        stored.ClearField("kv_cache_spec_sliding_window")
        if stored.HasField("parent_block_hash"):
            _rewrite(stored.parent_block_hash)
        for block_hash in stored.block_hashes:
            _rewrite(block_hash)
    elif kind == "block_removed":
        removed = event.block_removed
        if not _is_told(removed.medium, removed.group_idx, group):
            return False
        if keyed:
            kept_hashes = [value for value in removed.block_hashes if _hash(value) not in keyed]
            del removed.block_hashes[:]
            removed.block_hashes.extend(kept_hashes)
        for block_hash in removed.block_hashes:
            _rewrite(block_hash)
        return bool(removed.block_hashes)
    return True


def _is_told(medium: pb.StorageMedium.ValueType, group_idx: int, group: int) -> bool:
    return medium == pb.STORAGE_MEDIUM_GPU and group_idx == group


def _count_plain(stored: pb.BlockStored, keyed: Collection[bytes]) -> int:
    if keyed:
        for index, block_hash in enumerate(stored.block_hashes):
            if _hash(block_hash) in keyed:
                return index
    return len(stored.block_hashes)


def _hash(block_hash: pb.KvBlockHash) -> bytes:
    data = block_hash.SerializeToString()
    return wire.varint(len(data)) + data


def _rewrite(block_hash: pb.KvBlockHash) -> None:
    # vLLM's own integers are the last bytes of the whole hash, too.
    number = int.from_bytes(block_hash.value[-_INT64_BYTES:], "big", signed=True)
    block_hash.value = str(number).encode()
    block_hash.encoding = _ENCODING
