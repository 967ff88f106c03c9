"""Numbers on a command line: all that the contract can carry, and nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from openengine_vllm import flag_values
from openengine_vllm.client.commands.kv_events import add_arguments


@pytest.mark.parametrize(
    ("parse", "low", "high"),
    [
        (flag_values.port, 0, 65535),
        (flag_values.positive, 1, 2**31 - 1),
        (flag_values.byte_count, 1, 2**63 - 1),
        (flag_values.rank, 0, 2**32 - 1),
        (flag_values.sequence_number, 0, 2**64 - 1),
    ],
)
def test_the_ends_of_a_range(parse: Callable[[str], int], low: int, high: int) -> None:
    assert (parse(str(low)), parse(str(high))) == (low, high)
    for text in (str(low - 1), str(high + 1), "1.5", "", "one"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"from {low} to {high}"):
            parse(text)


def test_kv_events_takes_every_number_and_a_target() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    args = parser.parse_args(["--start", str(2**64 - 1), "--rank", str(2**32 - 1)])
    assert (args.start, args.ranks) == (2**64 - 1, [2**32 - 1])
    with pytest.raises(argparse.ArgumentError, match="names no server"):
        parser.parse_args(["--target", " "])
