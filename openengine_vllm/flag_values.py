"""Whole numbers on a command line."""

from __future__ import annotations

import argparse


def port(text: str) -> int:
    """A TCP port, or 0."""
    return _integer(text, 0, 65535)


def positive(text: str) -> int:
    """From 1 to 2**31 - 1."""
    return _integer(text, 1, 2**31 - 1)


def byte_count(text: str) -> int:
    """From 1 to 2**63 - 1."""
    return _integer(text, 1, 2**63 - 1)


def rank(text: str) -> int:
    """A data-parallel rank, which the contract gives 32 bits."""
    return _integer(text, 0, 2**32 - 1)


def sequence_number(text: str) -> int:
    """Of a batch of KV events, which the contract gives 64 bits."""
    return _integer(text, 0, 2**64 - 1)


def _integer(text: str, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
    return value
