"""The `kv-events` command: what enters and leaves an engine's prefix cache, as it happens."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Final

from openengine_vllm.client.commands.running import (
    SUCCESS,
    add_connection_arguments,
    open_client,
    print_json,
    run_command,
)
from openengine_vllm.flag_values import rank, sequence_number
from openengine_vllm.protocol import v1 as pb

DESCRIPTION = """\
Print an engine's KV event batches as they come, until interrupted."""

_MEDIUM: Final = "STORAGE_MEDIUM_"
_DECIMAL: Final = "decimal_int64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `kv-events`."""
    add_rank_argument(parser)
    parser.add_argument(
        "--snapshot", action="store_true", help="begin with what is cached at the moment"
    )
    parser.add_argument(
        "--start",
        type=sequence_number,
        default=0,
        metavar="N",
        help="begin with this sequence number (0: from now on)",
    )
    parser.add_argument("--json", action="store_true", help="print each response as a JSON line")
    add_connection_arguments(parser)


def add_rank_argument(parser: argparse.ArgumentParser) -> None:
    """Declares `--rank`."""
    parser.add_argument(
        "--rank",
        dest="ranks",
        type=rank,
        action="append",
        default=[],
        metavar="N",
        help="only this data-parallel rank; repeat it for more (default: all)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints batches until the server ends the stream."""
    return run_command(lambda: _kv_events(args))


async def _kv_events(args: argparse.Namespace) -> int:
    async with open_client(args) as client:
        subscription = client.subscribe_kv_events(
            args.ranks,
            include_snapshot=args.snapshot,
            start_sequence_number=args.start,
            timeout=args.timeout,
        )
        async with aclosing(subscription) as responses:
            async for response in responses:
                if args.json:
                    print_json(response)
                else:
                    print("\n".join(_lines(response.batch)), flush=True)
    return SUCCESS


def _lines(batch: pb.KvEventBatch) -> Iterator[str]:
    at = datetime.fromtimestamp(batch.timestamp_unix_nanos / 1e9, UTC)
    front = f"{at:%H:%M:%S.%f} rank={batch.data_parallel_rank} seq={batch.sequence_number}"
    if not batch.events:
        yield f"{front} nothing"
    for event in batch.events:
        kind = event.WhichOneof("event")
        if kind == "block_stored":
            yield f"{front} stored {_stored(event.block_stored)}"
        elif kind == "block_removed":
            gone = event.block_removed
            yield f"{front} removed {_place(gone)} {_hashes(gone.block_hashes)}"
        elif kind == "all_blocks_cleared":
            yield f"{front} cleared"
        else:
            yield f"{front} unknown"


def _stored(event: pb.BlockStored) -> str:
    parts = [_place(event), f"tokens={len(event.token_ids)}"]
    if event.lora_name:
        parts.append(f"lora={event.lora_name}")
    if event.HasField("parent_block_hash"):
        parts.append(f"parent={_hash(event.parent_block_hash)}")
    return " ".join([*parts, _hashes(event.block_hashes)])


def _place(event: pb.BlockStored | pb.BlockRemoved) -> str:
    known = event.medium in pb.StorageMedium.values()
    name = pb.StorageMedium.Name(event.medium) if known else str(event.medium)
    place = f"medium={name.removeprefix(_MEDIUM).lower()}"
    return f"{place} group={event.group_idx}" if event.group_idx else place


def _hashes(blocks: Iterable[pb.KvBlockHash]) -> str:
    return "blocks=" + ",".join(map(_hash, blocks))


def _hash(block: pb.KvBlockHash) -> str:
    if block.encoding == _DECIMAL:
        return block.value.decode("ascii", "replace")
    return block.value.hex()
