"""Structured logs: one line an event on stderr, logfmt or JSON. No prompt text, ever."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

_FIRST_KEYS = ("timestamp", "level", "event")
_BARE = re.compile(r'[^\s"=\\]+')


def configure(level: str, format_: str = "logfmt") -> None:
    """Set the process's own log level (a name of :mod:`logging`) and format, also ``json``."""
    structlog.configure(
        processors=[
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _RENDERERS[format_],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def render_line(logger: object, method: str, event: MutableMapping[str, Any]) -> str:
    """Render an event as one line, whatever its values hold: clients choose some of them.

    A value that is not plain is quoted and escaped as JSON, and so is everything in it that
    does not print: control characters, terminal escapes, separators, reversed text.
    """
    return " ".join(f"{key}={_value(event[key])}" for key in _keys(event))


def render_json(logger: object, method: str, event: MutableMapping[str, Any]) -> str:
    """Render an event as one JSON object, in ASCII.

    Numbers and booleans stay what they are, whatever else there is becomes text.
    """
    return json.dumps({key: _json_value(event[key]) for key in _keys(event)})


_RENDERERS = {"logfmt": render_line, "json": render_json}


def _keys(event: MutableMapping[str, Any]) -> list[str]:
    first = [key for key in _FIRST_KEYS if key in event]
    return first + [key for key in event if key not in _FIRST_KEYS]


def _json_value(value: object) -> str | int | float | None:
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    # Readers that are strict take no half of a surrogate pair.
    return str(value).encode("utf-8", "backslashreplace").decode()


def _value(value: object) -> str:
    if value is None:
        return ""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if text.isprintable() and _BARE.fullmatch(text):
        return text
    return "".join(
        char if char.isprintable() else json.dumps(char)[1:-1]
        for char in json.dumps(text, ensure_ascii=False)
    )
