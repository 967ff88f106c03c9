"""Structured logs: one line an event on stderr, ``key=value`` pairs. No prompt text, ever."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(level: str) -> None:
    """Set the process's own log level (a name of :mod:`logging`) and format."""
    structlog.configure(
        processors=[
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
