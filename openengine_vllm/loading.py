"""From flags, or from an engine that lives already, to one that can be served."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from openengine_vllm.demo_model import ensure_demo_model
from openengine_vllm.engine.detokenizers import detokenizer_of
from openengine_vllm.engine.discovery import engine_info, has_chat_template, model_facts, model_info
from openengine_vllm.engine.guide_checker import GuideChecker
from openengine_vllm.engine.guide_params import worker_config
from openengine_vllm.engine.kv_events import kv_publishers, publish_kv_events
from openengine_vllm.engine.launch import build_engine, choose_on_cpu, parse_engine_args
from openengine_vllm.engine.runtime import Engine
from openengine_vllm.engine.stat_logger import attach_stats
from openengine_vllm.engine.stats import EngineStats
from openengine_vllm.lifecycle import Serving
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.settings import DEMO_MODEL, ServerSettings, add_server_arguments

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from openengine_vllm.engine.http import HttpFrontend


def load_engine(
    argv: list[str], prog: str, settings: ServerSettings, instance_id: str, version: str
) -> Serving:
    """Parse the engine's flags, load the model and start the engine's processes. Blocks.

    Raises:
        SystemExit: a flag is wrong; argparse has said so on stderr.
        Exception: whatever vLLM raises when it cannot start.
    """
    serves_http = settings.http_port is not None
    args, flags = parse_engine_args(
        argv, prog, add_server_arguments, _resolve_model, http=serves_http
    )
    http = _http_frontend(flags) if serves_http else None
    if settings.kv_events.enabled:
        publish_kv_events(args)
    # Started here, it gets ready in the time that the engine takes to load.
    guides = GuideChecker()
    try:
        llm, stats = build_engine(
            args, http=serves_http, with_metrics=settings.metrics_port is not None
        )
        if http is not None:
            http.attach(llm)
        return _serving(
            llm, stats, guides, flags.served_model_name, settings, instance_id, version, http
        )
    except BaseException:
        guides.close()
        raise


def attach_engine(
    llm: AsyncLLM,
    served_names: Sequence[str],
    settings: ServerSettings,
    instance_id: str,
    version: str,
) -> Serving:
    """The same of an engine that runs in this process already. Blocks for about a second.

    Raises:
        ValueError: it keeps no statistics.
    """
    stats = EngineStats()
    attach_stats(llm, stats)
    guides = GuideChecker()
    try:
        return _serving(llm, stats, guides, served_names, settings, instance_id, version, None)
    except BaseException:
        guides.close()
        raise


def _serving(
    llm: AsyncLLM,
    stats: EngineStats,
    guides: GuideChecker,
    served_names: Sequence[str],
    settings: ServerSettings,
    instance_id: str,
    version: str,
    http: HttpFrontend | None,
) -> Serving:
    detokenizer = detokenizer_of(llm)
    pieces = detokenizer.pieces(llm.model_config.get_vocab_size())
    facts = model_facts(llm, tuple(served_names), pieces)
    if facts.guide_backend:
        guides.configure(worker_config(llm.vllm_config))
    else:
        guides.close()
    return Serving(
        engine=Engine(llm, facts, detokenizer, guides, settings.limits.max_response_bytes, stats),
        engine_info=engine_info(
            llm.vllm_config, facts, instance_id, pb.ENGINE_ROLE_AGGREGATED, version
        ),
        model_info=model_info(llm.vllm_config, facts, settings.limits),
        has_chat_template=has_chat_template(llm),
        http=http,
        kv_publishers=kv_publishers(llm, facts) if settings.kv_events.enabled else (),
    )


def _http_frontend(flags: argparse.Namespace) -> HttpFrontend:
    from openengine_vllm.engine.http import HttpFrontend

    return HttpFrontend(flags)


def _resolve_model(flags: argparse.Namespace) -> None:
    if flags.model != DEMO_MODEL:
        return
    flags.model = str(ensure_demo_model(None, _to_stderr))
    # With fewer digits a model this small answers otherwise on another kind of processor.
    choose_on_cpu(flags, "dtype", "auto", "float32")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
