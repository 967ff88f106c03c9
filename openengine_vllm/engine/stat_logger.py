"""The stat logger by which vLLM tells what its schedulers do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

from openengine_vllm.engine.stats import EngineStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats


def stat_logger(stats: EngineStats, *, with_metrics: bool = False) -> type[PrometheusStatLogger]:
    """A class for vLLM's ``stat_loggers`` that records into ``stats``, for all ranks.

    vLLM adds a Prometheus logger to whatever loggers it is given, unless one of them takes its
    place. This one does: the metrics cost 15 µs a step and 2 µs a token.

    Args:
        with_metrics: whether it is vLLM's own logger as well.
    """

    class SchedulerStatLogger(PrometheusStatLogger):
        """Keeps the schedulers' statistics and leaves the rest."""

        def __init__(
            self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None
        ) -> None:
            _configure(stats, vllm_config, engine_indexes)

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: object,
            mm_cache_stats: object = None,
            engine_idx: int = 0,
            **_: Any,
        ) -> None:
            """Called by vLLM once a step and rank, on the event loop."""
            if scheduler_stats is not None:
                stats.record(engine_idx, scheduler_stats)

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            """Nothing to keep."""

        def record_admission_rejection(self, reason: str) -> None:
            """Nothing to keep."""

        def log_engine_initialized(self) -> None:
            """Nothing to tell."""

    class FullStatLogger(PrometheusStatLogger):
        """Keeps the schedulers' statistics beside vLLM's metrics."""

        def __init__(
            self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None
        ) -> None:
            super().__init__(vllm_config, engine_indexes)
            _configure(stats, vllm_config, engine_indexes)

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: MultiModalCacheStats | None = None,
            engine_idx: int = 0,
            **others: Any,
        ) -> None:
            """Called by vLLM once a step and rank, on the event loop."""
            if scheduler_stats is not None:
                stats.record(engine_idx, scheduler_stats)
            super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx, **others)

    return FullStatLogger if with_metrics else SchedulerStatLogger


def _configure(
    stats: EngineStats, vllm_config: VllmConfig, engine_indexes: list[int] | None
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
