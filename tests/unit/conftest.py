"""Hypothesis for all unit tests: bounded, without time limits, and repeatable in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

settings.register_profile(
    "unit",
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("unit"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "unit")


@pytest.fixture(autouse=True)
def _logs_as_ever() -> Iterator[None]:
    """What a test has the log look like ends with it."""
    yield
    structlog.reset_defaults()
