"""The live blocks of one rank, and the events that keep a set of them exact.

vLLM may store a block's hash again while it is live, once for each copy in the cache, and
removes it once for each. Copies are counted, and only the first and the last is passed on: a
reader that keeps a set has the blocks that can be reused, no more and no less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from openengine_vllm.kv_events import wire
from openengine_vllm.kv_events.decode import REMOVED, STORED, Hash
from openengine_vllm.protocol import v1 as pb

_PAUSE_BLOCKS = 4096


class Block(NamedTuple):
    """A live block."""

    event: bytes
    """A stored event of this block alone, as part of a batch."""
    hash: Hash
    parent: Hash | None


_Group: TypeAlias = dict[Hash, Block]
Blocks: TypeAlias = list[list[Block]]
"""Live blocks as of one moment, those of each medium and group in the order they came."""


class Mirror:
    """What is in a rank's cache after all batches that were applied."""

    def __init__(self) -> None:
        # By medium as the contract names it, and group; an adapter is part of the hash.
        self._groups: dict[wire.Place, _Group] = {}
        self._copies: dict[wire.Place, dict[Hash, int]] = {}
        self.malformed = 0
        """Events left out because their extra keys cannot be passed on."""
        self.unknown_removals = 0
        """Removed hashes that were not live."""
        self._clears = 0
        self._foretold = 0

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def hashes(self, medium: pb.StorageMedium.ValueType, group: int = 0) -> frozenset[Hash]:
        """The live blocks of one medium and group."""
        return frozenset(self._groups.get((medium, group), ()))

    def blocks(self) -> Blocks:
        """The live blocks, as they stay while others are applied.

        Takes some 15 ns a block: nothing is copied but references.
        """
        return [list(group.values()) for group in self._groups.values()]

    @property
    def next_clear(self) -> int:
        """Counts the publisher's AllBlocksCleared: the one of a reset that begins now."""
        return max(self._clears, self._foretold) + 1

    def foretell(self, clear: int) -> bool:
        """A reset has succeeded: everything that the publisher says before its clear is over.

        That may still be to come, and so may be events from before the reset; they and the
        clear change nothing then.

        Args:
            clear: :attr:`next_clear` before the reset, one reset after the other.

        Returns:
            Whether the clear has yet to come; if so, everything is forgotten.
        """
        if self._clears >= clear:
            return False
        self._foretold = clear
        self._forget()
        return True

    def clear(self) -> None:
        """Forget everything, for what the publisher said is lost, clears perhaps among it."""
        self._clears = self.next_clear
        self._forget()

    def apply(self, events: Sequence[Any]) -> list[bytes]:
        """Follow a batch's events; returns what changed, as parts of a batch."""
        changes: list[bytes] = []
        if self._clears < self._foretold:
            events = self._after_foretold(events)
        for event in events:
            if isinstance(event, STORED):
                self._store(event, changes)
            elif isinstance(event, REMOVED):
                self._remove(event, changes)
            else:
                self._clears += 1
                self._forget()
                changes.append(wire.ALL_BLOCKS_CLEARED)
        return changes

    def _after_foretold(self, events: Sequence[Any]) -> Sequence[Any]:
        for index, event in enumerate(events):
            if not isinstance(event, STORED + REMOVED):
                self._clears += 1
                if self._clears == self._foretold:
                    return events[index + 1 :]
        return ()

    def _forget(self) -> None:
        self._groups.clear()
        self._copies.clear()

    def _store(self, event: Any, changes: list[bytes]) -> None:
        keys = b""
        each_keys: list[bytes] | None = None
        if event.extra_keys is not None:
            try:
                each_keys = list(map(wire.extra_keys, event.extra_keys))
            except (ValueError, RecursionError):
                self.malformed += 1
                return
        size = event.block_size
        place, common = wire.common_fields(
            size,
            event.lora_id,
            event.lora_name,
            event.medium,
            event.group_idx,
            event.kv_cache_spec_kind,
            event.kv_cache_spec_sliding_window,
        )
        group = self._groups.setdefault(place, {})
        parent = event.parent_block_hash
        if parent is not None:
            parent = wire.unsigned(parent)
        parent_part = None if parent is None else wire.block_hash(parent)
        run_parent = parent_part
        run_hashes: list[bytes] = []
        run_tokens: list[bytes] = []
        run_keys: list[bytes] = []
        end = 0
        for index, value in enumerate(event.block_hashes):
            value = wire.unsigned(value)
            hash_part = wire.block_hash(value)
            start, end = end, end + size
            if value in group:
                copies = self._copies.setdefault(place, {})
                copies[value] = copies.get(value, 1) + 1
                if run_hashes:
                    changes.append(_chain(run_hashes, run_parent, run_tokens, common, run_keys))
                    run_hashes, run_tokens, run_keys = [], [], []
                run_parent = hash_part
            else:
                packed = wire.tokens(event.token_ids[start:end])
                if each_keys is not None:
                    keys = each_keys[index]
                    run_keys.append(keys)
                stored = wire.stored((hash_part,), parent_part, packed, common, keys)
                group[value] = Block(stored, value, parent)
                run_hashes.append(hash_part)
                run_tokens.append(packed)
            parent, parent_part = value, hash_part
        if len(run_hashes) == 1:
            changes.append(group[parent].event)
        elif run_hashes:
            changes.append(_chain(run_hashes, run_parent, run_tokens, common, run_keys))

    def _remove(self, event: Any, changes: list[bytes]) -> None:
        place = where, group_idx = wire.medium(event.medium), event.group_idx or 0
        group, copies = self._groups.get(place, {}), self._copies.get(place, {})
        gone = []
        for value in event.block_hashes:
            value = wire.unsigned(value)
            if value in copies:
                copies[value] -= 1
                if copies[value] == 1:
                    del copies[value]
            elif group.pop(value, None) is not None:
                gone.append(wire.block_hash(value))
            else:
                self.unknown_removals += 1
        if gone:
            changes.append(wire.removed(gone, where, group_idx))


def _chain(
    hashes: list[bytes],
    parent: bytes | None,
    packed: list[bytes],
    common: bytes,
    keys: list[bytes],
) -> bytes:
    return wire.stored(hashes, parent, b"".join(packed), common, b"".join(keys))


def parents_first(blocks: Sequence[Block]) -> Iterator[Block | None]:
    """Blocks in an order in which none comes before its parent; otherwise as they are.

    None stands for a moment at which the caller may do something else.
    """
    # As a rule they are in order already; a parent that was removed and stored again is not.
    sent: set[Hash] = set()
    index: dict[Hash, Block] = {}
    for block in blocks:
        if block.hash in sent:
            continue
        if block.parent is not None and block.parent not in sent:
            if not index:
                for start in range(0, len(blocks), _PAUSE_BLOCKS):
                    part = blocks[start : start + _PAUSE_BLOCKS]
                    index.update((other.hash, other) for other in part)
                    yield None
            chain = []
            for ancestor in _unsent_ancestors(block, sent, index):
                chain.append(ancestor)
                if len(chain) % _PAUSE_BLOCKS == 0:
                    yield None
            sent.update(ancestor.hash for ancestor in chain)
            yield from reversed(chain)
        sent.add(block.hash)
        yield block


def _unsent_ancestors(block: Block, sent: set[Hash], live: Mapping[Hash, Block]) -> Iterator[Block]:
    met = {block.hash}
    parent = block.parent
    while parent is not None and parent not in sent and parent not in met and parent in live:
        met.add(parent)
        ancestor = live[parent]
        yield ancestor
        parent = ancestor.parent
