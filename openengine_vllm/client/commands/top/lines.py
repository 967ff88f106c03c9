"""From what `top` knows to the lines that it shows. Pure: texts and the names of their styles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from openengine_vllm.client.commands.health import state_name
from openengine_vllm.client.commands.top.monitor import HISTORY_SECONDS, Link, Monitor, number
from openengine_vllm.protocol import v1 as pb

Line = list[tuple[str, str]]
"""Pieces of text, each with a style: "", "label", "good", "warn", "bad" or "curve"."""

ABSENT: Final = "-"
"""For what the engine doesn't report, which is something else than a zero."""

_LEVELS: Final = "▁▂▃▄▅▆▇█"
_LABEL: Final = 11
_COLUMN: Final = 34
_MOST_BAR: Final = 40
_STATE_STYLES: Final = {
    pb.HEALTH_STATE_READY: "good",
    pb.HEALTH_STATE_STARTING: "warn",
    pb.HEALTH_STATE_DEGRADED: "warn",
    pb.HEALTH_STATE_DRAINING: "warn",
}
_FULL: Final = 0.9
_FILLING: Final = 0.7


def state(monitor: Monitor) -> tuple[str, str, str]:
    """The state in a word, its style, and a sentence on it that may be empty."""
    if monitor.link is Link.UP:
        if monitor.health is None:
            return "UP", "good", "the server does not report its health"
        value = monitor.health.state
        return state_name(value), _STATE_STYLES.get(value, "bad"), _complaint(monitor.health)
    if monitor.link is Link.CONNECTING:
        return "CONNECTING", "warn", ""
    since = f"since {clock(monitor.since)} UTC"
    if monitor.link is Link.AWAY:
        return "AWAY", "bad", f"no answer {since}; connects again by itself. {monitor.problem}"
    if monitor.link is Link.REFUSED:
        hint = "start with --api-key-file FILE, or set OPENENGINE_API_KEY"
        return "REFUSED", "bad", f"{monitor.problem}; {hint}"
    return "FAILED", "bad", f"{since}: {monitor.problem}"


def about(monitor: Monitor) -> Line:
    """Which engine this is."""
    engine = monitor.engine
    if engine is None:
        return [("model ", "label"), (ABSENT, "")]
    role = pb.EngineRole.Name(engine.role) if engine.role in pb.EngineRole.values() else ""
    models = list(engine.supported_models)
    more = f" (and {len(models) - 1} more)" if len(models) > 1 else ""
    values = {
        "model": (models[0] if models else ABSENT) + more,
        "role": role.removeprefix("ENGINE_ROLE_").lower() or ABSENT,
        "engine": f"{engine.engine_name} {engine.engine_version}".strip(),
        "instance": engine.instance_id,
    }
    line: Line = []
    for name, value in values.items():
        line += [(f"{name} ", "label"), (f"{value}   ", "")]
    return line


def figures(monitor: Monitor, now: float, width: int) -> list[Line]:
    """The load of the whole engine, and how it changed."""
    load = monitor.load or pb.LoadInfo()
    hit = number(load, "prefix_cache_hit_rate")
    preemptions = number(load, "preemptions")
    used, total = _get(load, "used_kv_blocks"), _get(load, "total_kv_blocks")
    samples = monitor.history
    curves: dict[str, tuple[str, list[tuple[float, float | None]]]] = {
        "generated": (
            f"{rate(number(load, 'generation_tokens_per_second'))} tok/s",
            [(s.at, s.generation) for s in samples],
        ),
        "prompt": (
            f"{rate(number(load, 'prompt_tokens_per_second'))} tok/s",
            [(s.at, s.prompt) for s in samples],
        ),
        "queue": (
            f"{count(_get(load, 'queued_requests'))}      ",
            [(s.at, s.queued) for s in samples],
        ),
    }
    lines = [
        _pair(
            ("requests", _two(load, "running_requests", "running", "queued_requests", "queued")),
            ("tokens", _two(load, "running_tokens", "running", "waiting_tokens", "waiting")),
        ),
        _pair(
            ("batch", _two(load, "prefill_batch_size", "prefill", "decode_batch_size", "decode")),
            (
                "cache",
                f"{percent(hit)} hits, "
                + (ABSENT if preemptions is None else f"{preemptions:,.0f}")
                + " preemptions",
            ),
        ),
        [_label("kv blocks"), *blocks(used, total, max(10, min(_MOST_BAR, width - 45)))],
    ]
    for name, (value, points) in curves.items():
        curve = sparkline(points, now, max(10, min(60, width - _LABEL - 18)))
        lines.append([_label(name), (f"{value:>15}  ", ""), (curve, "curve")])
    return lines


def ranks(monitor: Monitor, width: int) -> list[Line]:
    """A head, and the load of each data-parallel rank."""
    head = f"{'rank':>5}{'running':>9}{'queued':>8}{'prefill':>9}{'decode':>8}  kv blocks"
    lines: list[Line] = [[(head, "label")]]
    for rank in monitor.load.ranks if monitor.load is not None else ():
        cells = (
            f"{count(_get(rank, 'data_parallel_rank')):>5}"
            f"{count(_get(rank, 'running_requests')):>9}"
            f"{count(_get(rank, 'queued_requests')):>8}"
            f"{count(_get(rank, 'prefill_batch_size')):>9}"
            f"{count(_get(rank, 'decode_batch_size')):>8}  "
        )
        used, total = _get(rank, "used_kv_blocks"), _get(rank, "total_kv_blocks")
        bar_width = max(8, min(_MOST_BAR, width - len(cells) - 28))
        lines.append([(cells, ""), *blocks(used, total, bar_width)])
    return lines


def blocks(used: int | None, total: int | None, width: int) -> Line:
    """KV blocks as a bar of this width, as numbers and as a share."""
    if used is None or not total:
        return [(f"{count(used)}/{count(total)}", "")]
    share = used / total
    style = "bad" if share >= _FULL else "warn" if share >= _FILLING else "good"
    text = f" {count(used)}/{count(total)} {percent(share)}"
    return [*bar(share, width, style), (text, "")]


def bar(share: float, width: int, style: str) -> Line:
    """A bar that is empty for 0 alone, and full for 1 alone."""
    filled = round(share * width)
    if 0 < share < 1:
        filled = min(max(filled, 1), width - 1)
    filled = min(filled, width)
    return [("█" * filled, style), ("░" * (width - filled), "label")]


def sparkline(
    points: Iterable[tuple[float, float | None]],
    now: float,
    width: int,
    seconds: float = HISTORY_SECONDS,
) -> str:
    """A curve over the last seconds: each column is a mean, and blank where nothing is known.

    Columns begin at whole multiples of their length, so that they move without changing.
    """
    length = seconds / width
    last = math.floor(now / length)
    columns: list[list[float]] = [[] for _ in range(width)]
    for at, value in points:
        column = width - 1 - (last - math.floor(at / length))
        if value is not None and 0 <= column < width:
            columns[column].append(value)
    means = [sum(values) / len(values) if values else None for values in columns]
    top = max((mean for mean in means if mean is not None), default=0.0)
    return "".join(" " if mean is None else _level(mean, top) for mean in means)


def clock(seconds: float) -> str:
    """A time of day, UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S}"


def count(value: int | None) -> str:
    """A number, or what stands for none."""
    return ABSENT if value is None else f"{value:,}"


def rate(value: float | None) -> str:
    """A number per second, with as many digits as tell something."""
    if value is None:
        return ABSENT
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """A share of 1."""
    return ABSENT if share is None else f"{share:.1%}"


def plain(lines: Sequence[Line]) -> list[str]:
    """The lines without their styles."""
    return ["".join(text for text, _ in line) for line in lines]


def _level(value: float, top: float) -> str:
    # The lowest block is a zero's alone.
    return _LEVELS[math.ceil(value / top * (len(_LEVELS) - 1)) if top > 0 else 0]


def _complaint(health: pb.HealthResponse) -> str:
    """The message of the first check that is not as it should be, or of the first one."""
    bad = [check for check in health.checks if check.state != pb.HEALTH_STATE_READY]
    if bad:
        return f"{bad[0].name}: {bad[0].message}"
    if health.state == pb.HEALTH_STATE_READY:
        return ""
    return next((check.message for check in health.checks if check.message), "")


def _label(name: str) -> tuple[str, str]:
    return f"{name:<{_LABEL}}", "label"


def _pair(left: tuple[str, str], right: tuple[str, str]) -> Line:
    return [
        _label(left[0]),
        (f"{left[1]:<{_COLUMN}}", ""),
        (f"{right[0]:<8}", "label"),
        (right[1], ""),
    ]


def _two(load: pb.LoadInfo, first: str, first_word: str, second: str, second_word: str) -> str:
    return f"{count(_get(load, first))} {first_word}, {count(_get(load, second))} {second_word}"


def _get(load: pb.LoadInfo | pb.RankLoadInfo, name: str) -> int | None:
    present = {field.name: value for field, value in load.ListFields()}
    return present.get(name)
