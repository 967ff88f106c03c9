"""The whole way from flags to a live engine and what it tells of itself, in one blocking call."""

from __future__ import annotations

import sys

from openengine_vllm.demo_model import ensure_demo_model
from openengine_vllm.engine.detokenizers import detokenizer_of
from openengine_vllm.engine.discovery import engine_info, has_chat_template, model_facts, model_info
from openengine_vllm.engine.guide_checker import GuideChecker
from openengine_vllm.engine.guide_params import worker_config
from openengine_vllm.engine.kv_events import kv_publishers, publish_kv_events
from openengine_vllm.engine.launch import build_engine, parse_engine_args
from openengine_vllm.engine.runtime import Engine
from openengine_vllm.lifecycle import Serving
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.settings import DEMO_MODEL, ServerSettings, add_server_arguments


def load_engine(
    argv: list[str], prog: str, settings: ServerSettings, instance_id: str, version: str
) -> Serving:
    """Parse the engine's flags, load the model and start the engine's processes.

    Raises:
        SystemExit: a flag is wrong; argparse has said so on stderr.
        Exception: whatever vLLM raises when it cannot start.
    """
    args, served_names = parse_engine_args(argv, prog, add_server_arguments, _resolve_model)
    if settings.kv_events.enabled:
        publish_kv_events(args)
    # Started here, it gets ready in the time that the engine takes to load.
    guides = GuideChecker()
    try:
        llm, stats = build_engine(args)
        detokenizer = detokenizer_of(llm)
        pieces = detokenizer.pieces(llm.model_config.get_vocab_size())
        facts = model_facts(llm, served_names, pieces)
    except BaseException:
        guides.close()
        raise
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
        kv_publishers=kv_publishers(llm, facts) if settings.kv_events.enabled else (),
    )


def _resolve_model(name: str) -> str:
    return str(ensure_demo_model(None, _to_stderr)) if name == DEMO_MODEL else name


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
