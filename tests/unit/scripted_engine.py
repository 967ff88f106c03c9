"""An engine whose output the test decides, behind the real stream and the real services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

from grpc import aio
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerIterationDetails, SchedulerStats

from openengine_vllm.drain import Drains
from openengine_vllm.engine.facts import ModelFacts
from openengine_vllm.engine.information import InformationReader
from openengine_vllm.engine.outputs import SequenceOutput
from openengine_vllm.engine.pieces import Pieces
from openengine_vllm.engine.requests import GenerationPlan, PreparedRequest
from openengine_vllm.engine.scores import PendingScores, PromptScores, ScoreRow, ScoreRows
from openengine_vllm.engine.stats import Demand, EngineStats, Load
from openengine_vllm.engine.stream import GenerationStream, RunningSequence
from openengine_vllm.lifecycle import Lifecycle, Serving
from openengine_vllm.limits import MIB, RequestLimits
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.protocol.generation_encoding import GenerationEncoder
from openengine_vllm.protocol.revision import (
    CONTROL_NAME,
    INFERENCE_NAME,
    REVISIONS,
    SERVICE_NAME,
)
from openengine_vllm.protocol.v1.service_pb2_grpc import OpenEngineStub
from openengine_vllm.registry import RequestRegistry
from openengine_vllm.services.control import ControlService
from openengine_vllm.services.discovery import DiscoveryService
from openengine_vllm.services.drain import DrainService
from openengine_vllm.services.generate import GenerateService
from openengine_vllm.services.handlers import Handler, service_handler
from openengine_vllm.services.load import LoadService
from openengine_vllm.services.lora import LORA_HANDLERS
from openengine_vllm.services.probe import InferenceProbe
from openengine_vllm.services.reflection import DESCRIPTORS
from openengine_vllm.services.runtime_events import RuntimeEventsService
from openengine_vllm.services.split import control_handlers, inference_handlers
from openengine_vllm.services.stalls import StallWatch

FACTS = ModelFacts(
    served_names=("model", "alias"),
    max_model_len=1000,
    vocab_size=1000,
    has_tokenizer=True,
    generates=True,
    prefix_caching=True,
    priority_scheduling=True,
    data_parallel_ranks=(0,),
)
WORKER = ThreadPoolExecutor(1)
EOS = 0
SPECIAL = {EOS: "<eos>"}


class Letters:
    """Token 97 is ``a``; decodes a sequence, whatever its prompt."""

    special_tokens = SPECIAL

    def decoder(self, prompt_ids: Sequence[int], *, special: bool = False) -> Letters:
        """The same for all."""
        return self

    def pieces(self, vocab_size: int) -> Pieces:
        """None."""
        return Pieces()

    def step(self, token_id: int) -> str:
        """The letter."""
        return "" if token_id in SPECIAL else chr(token_id)


class Collector:
    """What vLLM's collector does: one merged output, or an error, and an event beside it."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self._tokens: list[int] = []
        self._scores: ScoreRows | None = None
        self.pending = PendingScores(lambda: None)
        self.prompt_scores: PromptScores | None = None
        self._reason: str | None = None
        self._cached = 0
        self._error: Exception | None = None
        self._full = False
        self.taken = asyncio.Event()
        """Set once something was taken."""

    def put(self, text: str = "", reason: str | None = None, *, cached: int = 0) -> None:
        """More output: its letters are tokens, ``.`` is EOS; ``reason`` ends it."""
        self._cached = cached
        self.put_ids(*(EOS if char == "." else ord(char) for char in text), reason=reason)

    def put_ids(
        self, *token_ids: int, reason: str | None = None, scores: list[ScoreRow] | None = None
    ) -> None:
        """Tokens by their ids, and their scores."""
        self._tokens += token_ids
        if scores is not None:
            self._scores = self._scores or ScoreRows(self.pending)
            for row in scores:
                self._scores.append(row)
        self._reason = reason
        self._full = True
        self.ready.set()

    def break_(self, error: Exception) -> None:
        """The engine is gone."""
        self._error = error
        self._full = True
        self.ready.set()

    def get_nowait(self) -> Any:
        """What was put since the last call."""
        if not self._full:
            return None
        self.ready.clear()
        self.taken.set()
        self._full = False
        if self._error is not None:
            raise self._error
        completion = SimpleNamespace(
            token_ids=self._tokens, finish_reason=self._reason, logprobs=self._scores
        )
        self._tokens, self._scores = [], None
        return SimpleNamespace(
            outputs=[completion],
            num_cached_tokens=self._cached,
            prompt_logprobs=self.prompt_scores,
        )


class ScriptedEngine:
    """Accepts requests; the test feeds their collectors."""

    def __init__(self) -> None:
        self.facts = FACTS
        self.dead = False
        self.tracer: Any = None
        self.plan: GenerationPlan
        """That of the last request."""
        self.trace_headers: Mapping[str, str] | None = None
        """Those of the last request."""
        self.collectors: dict[str, list[Collector]] = {}
        """By request id, one an output."""
        self.aborted: set[str] = set()
        """Engine ids, ``request/output``, that are to be dropped."""
        self.refusal: BaseException | None = None
        """What the next request meets in place of acceptance."""
        self.gate = asyncio.Event()
        """Requests and probes wait here."""
        self.gate.set()
        self.probes = 0
        self.stats = EngineStats()
        self.demand = Demand(0, 0, 0, 0)
        """What is asked of the engine, as GetLoad is to tell it."""
        self.probed = asyncio.Event()
        """Set by the first probe."""
        self.probe_error: Exception | None = None
        self.changed = asyncio.Condition()

    @property
    def progress(self) -> int:
        return self.stats.steps

    def load(self) -> Load:
        """As the engine computes it."""
        return self.stats.load(self.demand)

    async def prepare(self, plan: GenerationPlan) -> PreparedRequest:
        """Nothing to do: prompts are token ids."""
        return PreparedRequest(plan, {}, plan.prompt_ids or [])

    async def submit(
        self, request: PreparedRequest, trace_headers: Mapping[str, str] | None = None
    ) -> GenerationStream:
        """Accept a request."""
        plan = request.plan
        self.plan, self.trace_headers = plan, trace_headers
        await self.gate.wait()
        if self.refusal is not None:
            raise self.refusal
        stream = self.unstarted(request)
        async with self.changed:
            self.changed.notify_all()
        return stream

    def unstarted(self, request: PreparedRequest) -> GenerationStream:
        """A stream that nothing has happened to."""
        plan = request.plan
        collectors = [Collector() for _ in range(plan.sequences)]
        sequences = [
            RunningSequence(
                index,
                f"{plan.request_id}/{index}",
                cast("Any", collector),
                SequenceOutput(Letters(), SPECIAL, plan.rules),
            )
            for index, collector in enumerate(collectors)
        ]
        self.collectors[plan.request_id] = collectors
        return GenerationStream(
            sequences,
            GenerationEncoder(plan.request_id, 4 * MIB, detailed_errors=plan.detailed_errors),
            information=InformationReader(plan.information, Pieces()),
            prompt_tokens=len(plan.prompt_ids or ()),
            reports_cache=True,
            abort=self.abort,
            progress=self.stats.progress,
            worker=WORKER,
        )

    def abort(self, engine_ids: Sequence[str]) -> None:
        """Drop these."""
        self.aborted.update(engine_ids)

    def share(self, *_: object) -> None:
        """Nobody else comes."""

    def tell_of_resets(self, *_: object) -> None:
        """Nobody resets its cache."""

    async def probe(self) -> None:
        """Answer a probe."""
        self.probes += 1
        self.probed.set()
        await self.gate.wait()
        if self.probe_error is not None:
            raise self.probe_error

    async def accepted(self, request_id: str) -> list[Collector]:
        """Wait until a request is accepted."""
        async with self.changed:
            await self.changed.wait_for(lambda: request_id in self.collectors)
        return self.collectors[request_id]


class Service:
    """The services on a loopback port, over a scripted engine."""

    def __init__(
        self,
        *,
        capacity: int = 8,
        probe_timeout: float = 60,
        retained: int = 1000,
        deliveries: float = 1e9,
    ) -> None:
        self.engine = ScriptedEngine()
        self.lifecycle = Lifecycle()
        self.registry = RequestRegistry(capacity)
        self.probe = InferenceProbe(probe_timeout)
        self.events = RuntimeEventsService(
            self.lifecycle, self.registry, StallWatch(60), "instance", retained, deliveries
        )
        self.reported: list[pb.HealthState.ValueType] = []
        """What grpc.health.v1 was told."""
        self.channel: aio.Channel
        self.target: str

    def make_ready(self) -> None:
        """The model has loaded."""
        self.lifecycle.ready(
            Serving(
                cast("Any", self.engine),
                pb.EngineInfo(engine_name="scripted", instance_id="instance"),
                pb.ModelInfo(served_model_name="model"),
                has_chat_template=False,
            )
        )

    def services(self) -> dict[str, dict[str, Handler]]:
        """As the server binds them, by full name."""
        control = ControlService(
            self.lifecycle, self.registry, self.probe, pb.ENGINE_ROLE_AGGREGATED
        )
        discovery = DiscoveryService(self.lifecycle)
        generate = GenerateService(
            self.lifecycle, self.registry, RequestLimits(max_sequences=4), StallWatch(60)
        )
        drains = Drains(self.lifecycle, self.registry, self._report)
        drain = DrainService(self.lifecycle, drains, StallWatch(60))
        handlers: dict[str, Handler] = {
            "Generate": generate.generate,
            "GetEngineInfo": discovery.engine_info,
            "GetModelInfo": discovery.model_info,
            "Health": control.health,
            "Abort": control.abort,
            "Drain": drain.drain,
            "GetLoad": LoadService(self.lifecycle).load,
            "SubscribeRuntimeEvents": self.events.subscribe,
            **LORA_HANDLERS,
        }
        own: dict[str, Handler] = {
            "GetServerInfo": discovery.server_info,
            "GetModelInfo": discovery.split_model_info,
        }
        return {
            SERVICE_NAME: handlers,
            INFERENCE_NAME: inference_handlers(generate),
            CONTROL_NAME: control_handlers(handlers, own),
        }

    async def _report(self) -> None:
        self.reported.append(self.lifecycle.state)

    def generate(
        self, request: pb.GenerateRequest
    ) -> aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]:
        """Call Generate."""
        return OpenEngineStub(self.channel).Generate(request, timeout=60)

    def subscribe(
        self, *types: pb.RuntimeEventType.ValueType
    ) -> aio.UnaryStreamCall[pb.SubscribeRuntimeEventsRequest, pb.SubscribeRuntimeEventsResponse]:
        """Call SubscribeRuntimeEvents."""
        message = pb.SubscribeRuntimeEventsRequest(types=types)
        return OpenEngineStub(self.channel).SubscribeRuntimeEvents(message, timeout=60)

    def drain(self, **fields: Any) -> aio.UnaryStreamCall[pb.DrainRequest, pb.DrainResponse]:
        """Call Drain."""
        return OpenEngineStub(self.channel).Drain(pb.DrainRequest(**fields), timeout=60)

    async def call(self, name: str, request: Any) -> Any:
        """Call a unary RPC."""
        answers: dict[str, Callable[[bytes], Any]] = {
            "Health": pb.HealthResponse.FromString,
            "Abort": pb.AbortResponse.FromString,
            "GetEngineInfo": pb.EngineInfo.FromString,
            "GetModelInfo": pb.ModelInfo.FromString,
            "GetLoad": pb.LoadInfo.FromString,
        }
        method = self.channel.unary_unary(
            f"/{pb.SERVICE.full_name}/{name}",
            type(request).SerializeToString,
            answers.get(name, bytes),
        )
        return await method(request, timeout=60)

    async def idle(self) -> None:
        """Wait until no request is live."""
        changed = asyncio.Event()
        self.registry.watch(changed.set)
        while len(self.registry):
            changed.clear()
            await changed.wait()
        self.registry.unwatch(changed.set)


@asynccontextmanager
async def serve(*, ready: bool = True, **settings: Any) -> AsyncIterator[Service]:
    """A service that answers, and a channel to it."""
    service = Service(**settings)
    if ready:
        service.make_ready()
    async with (
        _listening(service.services()) as service.target,
        aio.insecure_channel(service.target) as service.channel,
    ):
        yield service


@asynccontextmanager
async def serve_handlers(handlers: dict[str, Handler]) -> AsyncIterator[aio.Channel]:
    """A channel to these handlers of the service."""
    async with (
        _listening({SERVICE_NAME: handlers}) as target,
        aio.insecure_channel(target) as channel,
    ):
        yield channel


@asynccontextmanager
async def _listening(services: dict[str, dict[str, Handler]]) -> AsyncIterator[str]:
    server = aio.server()
    for revision in REVISIONS.values():
        server.add_generic_rpc_handlers(
            service_handler(
                DESCRIPTORS[name], services[name], detailed_errors=revision.detailed_errors
            )
            for name in revision.services
            if name in services
        )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def scheduler_stats(**fields: Any) -> SchedulerStats:
    """What vLLM's scheduler says after a step; ``prefill`` and ``decode`` are batch sizes."""
    stats = SchedulerStats(prefix_cache_stats=PrefixCacheStats(**fields.pop("cache", {})))
    if "prefill" in fields or "decode" in fields:
        prefill, decode = fields.pop("prefill", 0), fields.pop("decode", 0)
        stats.iteration_details = SchedulerIterationDetails(
            iteration_index=fields.pop("iteration", 0),
            num_ctx_requests=prefill,
            num_ctx_tokens=10 * prefill,
            num_generation_requests=decode,
            num_generation_tokens=decode,
            elapsed_ms=2.5,
        )
    for name, value in fields.items():
        setattr(stats, name, value)
    return stats


def request(request_id: str = "r", **fields: Any) -> pb.GenerateRequest:
    """A valid request."""
    return pb.GenerateRequest(request_id=request_id, token_ids=pb.TokenIds(ids=[1, 2]), **fields)
