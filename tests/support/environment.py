"""The environment that programs under test are started with."""

from __future__ import annotations

import os


def server_environment(**extra: str) -> dict[str, str]:
    """The environment for a server under test."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **extra,
    }
