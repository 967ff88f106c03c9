"""What the engine's schedulers say after each step, kept for GetLoad and runtime events.

vLLM hands over one `SchedulerStats` a step and rank, on the event loop, so recording one costs
next to nothing: it is kept as it is, and read when somebody asks. While the engine is idle vLLM
says nothing; how many requests it has is known here all the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import IterationStats, SchedulerIterationDetails, SchedulerStats

RATE_SECONDS = 10
"""Throughput is the mean over so many seconds."""
_RECENT_REQUESTS = 1000
"""The cache hit rate is over so many requests."""
_MOST_NUMBERS = 64
"""Figures of a connector's that are taken from one step."""


@dataclass(slots=True)
class Progress:
    """Counts what the engine has answered, over all requests."""

    tokens: int = 0
    """Generated tokens."""


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One pass through the model."""

    iteration: int | None
    """Counts the rank's passes; None where vLLM was not told to tell."""
    milliseconds: float | None
    """How long the scheduler waited for it; None likewise."""
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank's scheduler said after one step."""

    rank: int
    time_ns: int
    """Since the epoch."""
    running: int
    queued: int
    """Requests that wait, the deferred ones among them."""
    deferred: int
    """Requests that wait for something else than room."""
    used_blocks: int | None
    total_blocks: int | None
    forward_pass: ForwardPass | None
    """None for a step that computed nothing."""
    transfers: Mapping[str, float]
    """Figures of the KV connector's; empty when it moved nothing."""

    @property
    def prefill_batch(self) -> int:
        """Requests whose prompt was worked on."""
        return 0 if self.forward_pass is None else self.forward_pass.prefill_requests

    @property
    def decode_batch(self) -> int:
        """Requests that went on generating."""
        return 0 if self.forward_pass is None else self.forward_pass.decode_requests


@dataclass(frozen=True, slots=True)
class Demand:
    """What has been asked of the engine and is not done, as its frontend knows."""

    requests: int
    """That vLLM has, one an output."""
    held_back: int
    """That wait before vLLM, for a guide or for requests that they must not meet."""
    running_tokens: int
    waiting_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is."""

    time_ns: int
    """When its figures were taken, since the epoch."""
    running: int
    queued: int
    running_tokens: int
    waiting_tokens: int
    ranks: Sequence[Step]
    attributes: Mapping[str, str]

    def blocks(self) -> tuple[int | None, int | None]:
        """Used and total KV blocks of all ranks; None where there is no KV cache."""
        if any(rank.total_blocks is None for rank in self.ranks):
            return None, None
        used = sum(rank.used_blocks or 0 for rank in self.ranks)
        return used, sum(rank.total_blocks or 0 for rank in self.ranks)


class RecentRate:
    """A mean per second over the last :data:`RATE_SECONDS`, in as many counters."""

    def __init__(self) -> None:
        self._counts = [0] * RATE_SECONDS
        self._seconds = [0] * RATE_SECONDS

    def add(self, amount: int, now: float) -> None:
        """Count; ``now`` is in seconds."""
        second = int(now)
        slot = second % RATE_SECONDS
        if self._seconds[slot] != second:
            self._seconds[slot] = second
            self._counts[slot] = 0
        self._counts[slot] += amount

    def per_second(self, now: float) -> float:
        """The mean up to ``now``."""
        oldest = int(now) - RATE_SECONDS
        pairs = zip(self._seconds, self._counts, strict=True)
        return sum(count for second, count in pairs if second > oldest) / RATE_SECONDS


class CacheHits:
    """How many tokens of the last requests' prompts were in the prefix cache."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int, int]] = deque()
        self._requests = self._queried = self._hit = 0
        self.total_queried = 0
        self.total_hit = 0

    @property
    def rate(self) -> float | None:
        """0 to 1; None before the first request."""
        return self._hit / self._queried if self._queried else None

    def add(self, requests: int, queried: int, hit: int) -> None:
        """Count the requests of one step, and their tokens."""
        self.total_queried += queried
        self.total_hit += hit
        self._recent.append((requests, queried, hit))
        self._requests += requests
        self._queried += queried
        self._hit += hit
        while self._requests > _RECENT_REQUESTS and len(self._recent) > 1:
            requests, queried, hit = self._recent.popleft()
            self._requests -= requests
            self._queried -= queried
            self._hit -= hit


@dataclass(slots=True)
class _Rank:
    stats: SchedulerStats | None = None
    details: SchedulerIterationDetails | None = None
    iteration: IterationStats | None = None
    time_ns: int = 0


@dataclass(slots=True)
class EngineStats:
    """The last word of each rank's scheduler, and what adds up over steps."""

    progress: Progress = field(default_factory=Progress)
    """Counted by the streams."""
    steps: int = 0
    """That the schedulers have told of: an engine that hangs tells of none."""
    _ranks: dict[int, _Rank] = field(default_factory=lambda: {0: _Rank()})
    _total_blocks: int | None = None
    _prefix_caching: bool = False
    _watchers: list[Callable[[Step], None]] = field(default_factory=list)
    _hits: CacheHits = field(default_factory=CacheHits)
    _preemptions: int = 0
    _prompt_rate: RecentRate = field(default_factory=RecentRate)
    _generation_rate: RecentRate = field(default_factory=RecentRate)
    _counted_tokens: int | None = 0
    """Of those in ``progress``; None where steps tell of their tokens."""

    def configure(
        self, ranks: Sequence[int], total_blocks: int | None, *, prefix_caching: bool
    ) -> None:
        """Tell what the engine is.

        Args:
            ranks: absolute data-parallel ranks.
            total_blocks: KV blocks of each; None without a KV cache.
        """
        self._ranks = {rank: _Rank() for rank in ranks}
        self._total_blocks = total_blocks
        self._prefix_caching = prefix_caching

    @property
    def watched(self) -> bool:
        """Whether anybody is told of steps."""
        return bool(self._watchers)

    def watch(self, callback: Callable[[Step], None]) -> None:
        """Have ``callback`` run after each step."""
        self._watchers.append(callback)

    def unwatch(self, callback: Callable[[Step], None]) -> None:
        """Undo :meth:`watch`."""
        self._watchers.remove(callback)

    def record(
        self, rank: int, stats: SchedulerStats, iteration: IterationStats | None = None
    ) -> None:
        """Take what a rank's scheduler says after a step.

        Args:
            rank: absolute data-parallel rank.
            stats: the scheduler's.
            iteration: the frontend's, of all requests whoever sent them; None where vLLM does
                not keep them.
        """
        self.steps += 1
        entry = self._ranks[rank]
        entry.stats, entry.details, entry.iteration = stats, stats.iteration_details, iteration
        entry.time_ns = time.time_ns()
        now = time.monotonic()
        cache = stats.prefix_cache_stats
        if cache.requests:
            self._hits.add(cache.requests, cache.queries, cache.hits)
        self._preemptions += cache.preempted_requests
        if (tokens := _prefill_tokens(entry)) > 0:
            self._prompt_rate.add(tokens, now)
        if iteration is not None:
            self._generation_rate.add(iteration.num_generation_tokens, now)
            self._counted_tokens = None
        self._count_tokens(now)
        if self._watchers:
            step = self._step(rank, entry)
            for callback in tuple(self._watchers):
                callback(step)

    def load(self, demand: Demand) -> Load:
        """How busy the engine is now.

        The frontend knows best how many requests there are; the schedulers, how many of them
        ran in the last step. The rest waits, also where no step has told of it yet.
        """
        now_ns, now = time.time_ns(), time.monotonic()
        self._count_tokens(now)
        recorded = [entry.time_ns for entry in self._ranks.values() if entry.time_ns]
        busy = demand.requests > 0
        ranks = [
            self._step(rank, entry) if busy else self._idle(rank, now_ns)
            for rank, entry in self._ranks.items()
        ]
        running = min(sum(rank.running for rank in ranks), demand.requests)
        return Load(
            time_ns=max(recorded) if busy and recorded else now_ns,
            running=running,
            queued=demand.requests - running + demand.held_back,
            running_tokens=demand.running_tokens,
            waiting_tokens=demand.waiting_tokens,
            ranks=ranks,
            attributes=self._attributes(now),
        )

    def _count_tokens(self, now: float) -> None:
        tokens = self.progress.tokens
        if self._counted_tokens is not None and tokens != self._counted_tokens:
            self._generation_rate.add(tokens - self._counted_tokens, now)
            self._counted_tokens = tokens

    def _idle(self, rank: int, now_ns: int) -> Step:
        used = None if self._total_blocks is None else 0
        return Step(rank, now_ns, 0, 0, 0, used, self._total_blocks, None, {})

    def _step(self, rank: int, entry: _Rank) -> Step:
        stats = entry.stats
        if stats is None:
            return self._idle(rank, time.time_ns())
        deferred = stats.num_skipped_waiting_reqs
        return Step(
            rank=rank,
            time_ns=entry.time_ns,
            running=stats.num_running_reqs,
            queued=stats.num_waiting_reqs + deferred,
            deferred=deferred,
            used_blocks=self._used_blocks(stats.kv_cache_usage),
            total_blocks=self._total_blocks,
            forward_pass=_forward_pass(entry),
            transfers=dict(_numbers("", stats.kv_connector_stats or {})),
        )

    def _used_blocks(self, usage: float) -> int | None:
        # vLLM keeps one block to itself, and its usage is a share of the others.
        return None if self._total_blocks is None else round(usage * (self._total_blocks - 1))

    def _attributes(self, now: float) -> dict[str, str]:
        attributes = {
            "generation_tokens_per_second": _text(self._generation_rate.per_second(now)),
            "prompt_tokens_per_second": _text(self._prompt_rate.per_second(now)),
        }
        if self._prefix_caching:
            attributes |= {
                "prefix_cache_queried_tokens": str(self._hits.total_queried),
                "prefix_cache_hit_tokens": str(self._hits.total_hit),
                "preemptions": str(self._preemptions),
            }
            if (rate := self._hits.rate) is not None:
                attributes["prefix_cache_hit_rate"] = _text(rate)
        return attributes


def _prefill_tokens(rank: _Rank) -> int:
    if rank.details is not None:
        return rank.details.num_ctx_tokens
    return 0 if rank.iteration is None else rank.iteration.prompt_token_stats.computed


def _forward_pass(rank: _Rank) -> ForwardPass | None:
    details = rank.details
    if details is None:
        return _forward_pass_of_frontend(rank)
    if details.is_dummy:
        return None
    return ForwardPass(
        iteration=details.iteration_index,
        milliseconds=details.elapsed_ms,
        prefill_requests=details.num_ctx_requests,
        prefill_tokens=details.num_ctx_tokens,
        decode_requests=details.num_generation_requests,
        decode_tokens=details.num_generation_tokens,
    )


def _forward_pass_of_frontend(rank: _Rank) -> ForwardPass | None:
    """What the frontend can tell: it sees a prompt that takes several passes only in the last."""
    if (seen := rank.iteration) is None:
        return None
    prefills, decodes = len(seen.time_to_first_tokens_iter), len(seen.inter_token_latencies_iter)
    return ForwardPass(
        iteration=None,
        milliseconds=None,
        prefill_requests=prefills,
        prefill_tokens=_prefill_tokens(rank),
        decode_requests=decodes,
        decode_tokens=max(seen.num_generation_tokens - prefills, 0),
    )


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers of a connector's own statistics, lists as their length and their sum."""
    found = 0
    items = value.items() if isinstance(value, Mapping) else ()
    for key, item in items:
        path = f"{name}_{key}" if name else str(key)
        for number in _numbers_of(path, item):
            if found == _MOST_NUMBERS:
                return
            found += 1
            yield number


def _numbers_of(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        yield from _numbers(path, value)
    elif isinstance(value, list | tuple):
        numbers = [item for item in value if _is_number(item)]
        if numbers:
            yield f"{path}_count", len(numbers)
            yield f"{path}_sum", sum(numbers)
    elif _is_number(value):
        yield path, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: float) -> str:
    return f"{value:.6g}"
