"""The stat logger by which vLLM tells what its schedulers do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger

from openengine_vllm.engine.stats import EngineStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


def stat_logger(
    stats: EngineStats, *, in_place_of_metrics: bool = True, hides_details: bool = False
) -> type[AggregateStatLoggerBase]:
    """A class for vLLM's ``stat_loggers`` that records into ``stats``, for all ranks.

    vLLM adds a Prometheus logger to whatever loggers it is given, unless one of them takes its
    place, as this one does with ``in_place_of_metrics``: the metrics would cost 15 µs a step and
    2 µs a token, and without HTTP nobody can read them. With ``hides_details`` vLLM's loggers
    after this one do not see what each step was made of, and so do not log a line of it.
    """
    base: Any = PrometheusStatLogger if in_place_of_metrics else AggregateStatLoggerBase

    class SchedulerStatLogger(base):  # type: ignore[misc]
        """Keeps the schedulers' statistics and leaves the rest."""

        def __init__(
            self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None
        ) -> None:
            ranks = engine_indexes or [0]
            cache = vllm_config.cache_config
            # vLLM has summed the blocks of all ranks; a model without a KV cache has one.
            blocks = (cache.num_gpu_blocks or 0) // len(ranks)
            stats.configure(
                ranks,
                blocks if blocks > 1 else None,
                prefix_caching=bool(cache.enable_prefix_caching),
            )

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: object = None,
            engine_idx: int = 0,
            **_: Any,
        ) -> None:
            """Called by vLLM once a step and rank, on the event loop."""
            if scheduler_stats is not None:
                stats.record(engine_idx, scheduler_stats, iteration_stats)
                if hides_details:
                    scheduler_stats.iteration_details = None

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            """Nothing to keep."""

        def record_admission_rejection(self, reason: str) -> None:
            """Nothing to keep."""

        def log_engine_initialized(self) -> None:
            """Nothing to tell."""

    return cast("type[AggregateStatLoggerBase]", SchedulerStatLogger)


def attach_stats(llm: AsyncLLM, stats: EngineStats) -> None:
    """Have an engine that lives already record into ``stats`` as well.

    Raises:
        ValueError: it keeps no statistics.
    """
    manager = llm.logger_manager
    if manager is None:
        raise ValueError("the engine keeps no statistics: leave out --disable-log-stats")
    logger = stat_logger(stats, in_place_of_metrics=False)
    manager.stat_loggers.append(logger(llm.vllm_config, manager.engine_indexes))
