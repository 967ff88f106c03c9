"""From command line flags to a running ``AsyncLLM``, and back to nothing.

Building the engine blocks for many seconds; callers run :func:`build_engine` in a thread.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import structlog
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.envs import enable_envs_cache
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from openengine_vllm.engine.stat_logger import stat_logger
from openengine_vllm.engine.stats import EngineStats

_log = structlog.get_logger(__name__)

_GIB = 1024**3
_CPU_KV_BYTES_MOST = 4 * _GIB
_CPU_KV_SPACE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_START_METHOD_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"


def parse_engine_args(
    argv: list[str],
    prog: str,
    add_server_arguments: Callable[[argparse.ArgumentParser], None],
    resolve_model: Callable[[argparse.Namespace], None],
    *,
    http: bool = False,
) -> tuple[AsyncEngineArgs, argparse.Namespace]:
    """Parse vLLM's engine flags, with our own beside them so that ``--config`` may set both.

    Args:
        argv: the command line.
        prog: the program's name, for messages.
        add_server_arguments: declares our own flags.
        resolve_model: puts a model that vLLM knows in place of a name of ours.
        http: take the flags of vLLM's HTTP server as well.

    Returns:
        The engine's arguments, and all flags. Their ``served_model_name`` is the default name
        and then its aliases (vLLM's own configuration keeps only the first).

    Raises:
        SystemExit: 2 and one line on stderr for a flag or value that is wrong.
    """
    parser = _parser(prog, add_server_arguments, http=http)
    chosen = _cpu_defaults() if current_platform.is_cpu() else {}
    standard_share = parser.get_default("gpu_memory_utilization")
    parser.set_defaults(**chosen)
    namespace = parser.parse_args(argv)
    if namespace.gpu_memory_utilization != standard_share:
        _leave_to_operator(namespace, chosen, "kv_cache_memory_bytes")
    for name, value in chosen.items():
        if getattr(namespace, name) == value:
            _log_choice(name, value)
    names = namespace.served_model_name or [namespace.model]
    if isinstance(names, str):
        names = [names]
    namespace.served_model_name = list(dict.fromkeys(names))
    resolve_model(namespace)
    return AsyncEngineArgs.from_cli_args(namespace), namespace


def _parser(
    prog: str, add_server_arguments: Callable[[argparse.ArgumentParser], None], *, http: bool
) -> FlexibleArgumentParser:
    if not http:
        parser = FlexibleArgumentParser(prog=prog, usage=argparse.SUPPRESS)
    else:
        from openengine_vllm.engine.http import add_http_arguments

        # Where both have a flag, ours is the last word.
        parser = FlexibleArgumentParser(
            prog=prog, usage=argparse.SUPPRESS, conflict_handler="resolve"
        )
        add_http_arguments(parser)
    add_server_arguments(parser)
    AsyncEngineArgs.add_cli_args(parser)
    return parser


def engine_flags_help(
    prog: str, add_server_arguments: Callable[[argparse.ArgumentParser], None], keyword: str
) -> None:
    """Print vLLM's own help for ``--help=KEYWORD`` (``all``, a group's title or a flag)."""
    _parser(prog, add_server_arguments, http=True).parse_args([f"--help={keyword}"])


def _cpu_defaults() -> dict[str, Any]:
    """Engine settings with which a plain start succeeds on a machine without a GPU."""
    chosen: dict[str, Any] = {"enforce_eager": True}
    if not os.environ.get(_CPU_KV_SPACE_VARIABLE):
        share = psutil.virtual_memory().available // 8
        chosen["kv_cache_memory_bytes"] = min(_CPU_KV_BYTES_MOST, share)
    return chosen


def choose_on_cpu(flags: argparse.Namespace, name: str, standard: Any, value: Any) -> None:
    """Without a GPU, set a flag that the operator has left at its standard value."""
    if current_platform.is_cpu() and getattr(flags, name) == standard:
        setattr(flags, name, value)
        _log_choice(name, value)


def _log_choice(name: str, value: Any) -> None:
    _log.info("cpu default chosen", flag="--" + name.replace("_", "-"), value=value)


def _leave_to_operator(namespace: argparse.Namespace, chosen: Mapping[str, Any], name: str) -> None:
    if name in chosen and getattr(namespace, name) == chosen[name]:
        setattr(namespace, name, None)


def build_engine(
    args: AsyncEngineArgs, *, http: bool = False, with_metrics: bool = False
) -> tuple[AsyncLLM, EngineStats]:
    """Load the model and start the engine's processes. Blocks until the engine is up.

    Call it where no event loop runs: vLLM looks at what is set here when its first request
    comes. The schedulers' statistics are kept, one record a step. Those of each token are not:
    they would cost several microseconds a token, and only vLLM's spans, metrics and HTTP server
    need them. Environment variables are read once, as vLLM's own processes do, since it looks at
    some for every token. The engine's processes are spawned unless the operator says otherwise: a
    fork of this one would hold the port, and whatever locks gRPC's threads hold at that moment.

    Args:
        http: leave vLLM's own loggers and metrics to its flags.
        with_metrics: have vLLM keep its metrics, in ``prometheus_client``'s global registry.
    """
    in_place_of_metrics = not with_metrics and (not http or args.disable_log_stats)
    args.disable_log_stats |= not http
    hides_details = not args.enable_logging_iteration_details
    args.enable_logging_iteration_details = True
    os.environ.setdefault(_START_METHOD_VARIABLE, "spawn")
    stats = EngineStats()
    llm = AsyncLLM.from_engine_args(
        args,
        usage_context=UsageContext.OPENAI_API_SERVER,
        stat_loggers=[
            stat_logger(stats, in_place_of_metrics=in_place_of_metrics, hides_details=hides_details)
        ],
    )
    if not (http or with_metrics or args.otlp_traces_endpoint):
        llm.log_stats = llm.output_processor.log_stats = False
    enable_envs_cache()
    return llm, stats
