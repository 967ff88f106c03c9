"""How much of a long test is run: what shows a fault in minutes, or as much as was promised.

``tox run -e soak`` runs the tests that use this at their full size.
"""

from __future__ import annotations

import os

FULL_SIZE = os.environ.get("OPENENGINE_TEST_SIZE") == "full"


def sized(short: int, full: int) -> int:
    """The number that this run is to use."""
    return full if FULL_SIZE else short
