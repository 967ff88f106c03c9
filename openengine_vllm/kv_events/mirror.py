"""The live blocks of one rank, and the events that keep a set of them exact.

vLLM may store a block's hash again while it is live, once for each copy in the cache, and
removes it once for each. Copies are counted, and only the first and the last is passed on: a
reader that keeps a set has the blocks that can be reused, no more and no less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from openengine_vllm.kv_events import wire
from openengine_vllm.kv_events.decode import REMOVED, STORED

_PAUSE_BLOCKS = 4096
_EVENT_BYTES = 128 * 1024
"""Of tokens and keys in one stored event; what is longer goes on in another."""
_EVENT_HASHES = 1024
"""In one removed event."""
_FULL_ATTENTION = (None, "", "full_attention")
"""Kinds of a group, one that is not told included."""

Blocks: TypeAlias = dict[bytes, bytes]
"""Live blocks in the order they came: by its hash, a stored event of each alone, both as parts of
a batch. The garbage collector walks neither them nor the dict, however many there are."""


class Mirror:
    """What is in a rank's cache after all batches that were applied."""

    def __init__(self) -> None:
        # By medium as the contract names it, and group; an adapter is part of the hash.
        self._groups: dict[wire.Place, Blocks] = {}
        self._copies: dict[wire.Place, dict[bytes, int]] = {}
        self.malformed = 0
        """Events left out because their extra keys cannot be passed on."""
        self.unknown_removals = 0
        """Removed hashes that were not live."""
        self.orphans = 0
        """Stored blocks of full attention left out because the one before them is not live: it was
        lost. Other kinds keep the end of a sequence alone."""
        self._clears = 0
        self._foretold = 0
        self._keyed: dict[wire.Place, set[bytes]] = {}
        self.keyed_changes: frozenset[bytes] = frozenset()
        """Of the blocks in the last batch, those whose hash, or that of a block before them, holds
        more than tokens and adapter: a salt, media. By :func:`wire.block_hash`."""
        self.full_group = 0
        """The first group of full attention, as far as blocks of it were stored."""
        self._has_full_group = False

    def keyed(self, place: wire.Place) -> frozenset[bytes]:
        """Live blocks as in :attr:`keyed_changes`, of one medium and group."""
        return frozenset(self._keyed.get(place, ()))

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def blocks(self) -> dict[wire.Place, Blocks]:
        """The live blocks of each medium and group, as they stay while others are applied.

        Takes some 20 ns a block: nothing is copied but references.
        """
        return {place: group.copy() for place, group in self._groups.items()}

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
        self.keyed_changes = frozenset()
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
        self._keyed.clear()

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
        is_full = event.kv_cache_spec_kind in _FULL_ATTENTION
        if is_full:
            self._note_full_group(place[1])
        group = self._groups.setdefault(place, {})
        adapter_keys = None if event.lora_name is None else [event.lora_name]
        keyed = self._keyed.get(place)
        parent = event.parent_block_hash
        if parent is not None:
            parent = wire.block_hash(parent)
        run_parent = parent
        run_hashes: list[bytes] = []
        run_tokens: list[bytes] = []
        run_keys: list[bytes] = []
        new_keyed: list[bytes] = []
        run_size = end = 0
        for index, block in enumerate(map(wire.block_hash, event.block_hashes)):
            start, end = end, end + size
            if block in group:
                copies = self._copies.setdefault(place, {})
                copies[block] = copies.get(block, 1) + 1
                if run_hashes:
                    changes.append(_chain(run_hashes, run_parent, run_tokens, common, run_keys))
                    run_hashes, run_tokens, run_keys = [], [], []
                run_parent = block
            elif is_full and parent is not None and not self._is_live(parent, group):
                # Nobody could place it, and a salt in front of it may be lost with the rest.
                self.orphans += 1
            else:
                packed = wire.tokens(event.token_ids[start:end])
                if each_keys is not None:
                    keys = each_keys[index]
                    run_keys.append(keys)
                    values = event.extra_keys[index]
                    if values and values != adapter_keys and keyed is None:
                        keyed = self._keyed[place] = set()
                    if keyed is not None and (
                        (values and values != adapter_keys) or parent in keyed
                    ):
                        keyed.add(block)
                        new_keyed.append(block)
                group[block] = wire.stored((block,), parent, packed, common, keys)
                run_hashes.append(block)
                run_tokens.append(packed)
                run_size += len(packed) + len(keys)
                if run_size > _EVENT_BYTES:
                    changes.append(_chain(run_hashes, run_parent, run_tokens, common, run_keys))
                    run_hashes, run_tokens, run_keys, run_size = [], [], [], 0
                    run_parent = block
            parent = block
        if len(run_hashes) == 1:
            changes.append(group[run_hashes[0]])
        elif run_hashes:
            changes.append(_chain(run_hashes, run_parent, run_tokens, common, run_keys))
        if new_keyed:
            self.keyed_changes |= set(new_keyed)

    def _is_live(self, block: bytes, group: Blocks) -> bool:
        """Whether it is in this group, or else in any other."""
        return block in group or any(block in other for other in self._groups.values())

    def _note_full_group(self, group: int) -> None:
        if not self._has_full_group or group < self.full_group:
            self.full_group, self._has_full_group = group, True

    def _remove(self, event: Any, changes: list[bytes]) -> None:
        place = where, group_idx = wire.medium(event.medium), event.group_idx or 0
        group, copies = self._groups.get(place, {}), self._copies.get(place, {})
        gone = []
        for block in map(wire.block_hash, event.block_hashes):
            if block in copies:
                copies[block] -= 1
                if copies[block] == 1:
                    del copies[block]
            elif group.pop(block, None) is not None:
                gone.append(block)
            else:
                self.unknown_removals += 1
        if keyed := self._keyed.get(place):
            self.keyed_changes |= keyed.intersection(gone)
            keyed.difference_update(gone)
        for start in range(0, len(gone), _EVENT_HASHES):
            changes.append(wire.removed(gone[start : start + _EVENT_HASHES], where, group_idx))


def _chain(
    hashes: list[bytes],
    parent: bytes | None,
    packed: list[bytes],
    common: bytes,
    keys: list[bytes],
) -> bytes:
    return wire.stored(hashes, parent, b"".join(packed), common, b"".join(keys))


def parents_first(blocks: Blocks) -> Iterator[bytes | None]:
    """Take all blocks out, none before its parent; otherwise in their order.

    None stands for a moment at which the caller may do something else.
    """
    for first in list(blocks):
        event = blocks.pop(first, None)
        if event is None:
            continue
        # As a rule the parent has gone already; one that was removed and stored again has not.
        chain: list[bytes] = []
        while (parent := blocks.pop(wire.parent_of(event), None)) is not None:
            chain.append(event)
            event = parent
            if len(chain) % _PAUSE_BLOCKS == 0:
                yield None
        yield event
        if chain:
            yield from reversed(chain)
