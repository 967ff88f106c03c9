"""GetLoad: how busy the engine is at this moment."""

from __future__ import annotations

from openengine_vllm.engine.stats import Load, Step
from openengine_vllm.lifecycle import Lifecycle
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.services.handlers import Context


class LoadService:
    """The GetLoad RPC."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    async def load(self, request: pb.GetLoadRequest, context: Context) -> pb.LoadInfo:
        """GetLoad; also while the server drains."""
        serving = self._lifecycle.serving
        return load_info(
            serving.engine.load(), serving.engine_info.instance_id, request.include_per_rank
        )


def load_info(load: Load, instance_id: str, per_rank: bool) -> pb.LoadInfo:
    """The answer to GetLoad. A single rank's requests are all of the engine's."""
    used, total = load.blocks()
    ranks = load.ranks if per_rank else ()
    return pb.LoadInfo(
        instance_id=instance_id,
        timestamp_unix_nanos=load.time_ns,
        running_requests=load.running,
        queued_requests=load.queued,
        active_kv_sessions=0,
        used_kv_blocks=used,
        total_kv_blocks=total,
        running_tokens=load.running_tokens,
        waiting_tokens=load.waiting_tokens,
        prefill_batch_size=sum(rank.prefill_batch for rank in load.ranks),
        decode_batch_size=sum(rank.decode_batch for rank in load.ranks),
        ranks=[_rank(rank, load) for rank in ranks],
        attributes=load.attributes,
    )


def _rank(rank: Step, load: Load) -> pb.RankLoadInfo:
    only = len(load.ranks) == 1
    return pb.RankLoadInfo(
        data_parallel_rank=rank.rank,
        running_requests=load.running if only else rank.running,
        queued_requests=load.queued if only else rank.queued,
        used_kv_blocks=rank.used_blocks,
        total_kv_blocks=rank.total_blocks,
        prefill_batch_size=rank.prefill_batch,
        decode_batch_size=rank.decode_batch,
    )
