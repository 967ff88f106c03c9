"""Rejections and checks that several parts of a request share."""

from __future__ import annotations

from collections.abc import Iterable

from openengine_vllm.engine.facts import ModelFacts
from openengine_vllm.protocol import errors


def rejected(field_path: str, message: str) -> errors.OpenEngineError:
    """The error for a field whose value is not allowed; ``message`` goes on after its path."""
    return errors.invalid_argument(field_path, f"{field_path} {message}")


def unsupported(field_path: str, message: str) -> errors.OpenEngineError:
    """The error for a field that this engine can't honour."""
    return errors.unsupported_option(field_path, f"{field_path} {message}")


def check_token_ids(ids: Iterable[int], field_path: str, model: ModelFacts) -> None:
    """Reject ids, of which there is at least one, that are outside the vocabulary."""
    largest = max(ids)
    if largest >= model.vocab_size:
        raise rejected(
            field_path, f"holds {largest}; token ids range from 0 to {model.vocab_size - 1}"
        )
