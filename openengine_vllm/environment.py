"""The server's flags as environment variables, for where its command line is another program's.

Each flag has one, named after it: ``--drain-timeout`` is ``OPENENGINE_DRAIN_TIMEOUT``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Final

from openengine_vllm.settings import ServerSettings, add_server_arguments, server_settings

PREFIX: Final = "OPENENGINE_"
_OPENING: Final = ("OPENENGINE_PORT", "OPENENGINE_UDS")
_OTHERS: Final = frozenset({"OPENENGINE_CACHE_DIR", "OPENENGINE_TARGET"})
"""Variables of our own programs that are no flags of the server."""
_OF_OUR_PROCESS: Final = {
    "http_host": "vLLM's own server serves HTTP here",
    "http_port": "vLLM's own server serves HTTP here",
    "exit_on_engine_death": "vLLM decides here, by VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
}
_SWITCH: Final = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def wants_server(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for a server: a port or a Unix socket is named."""
    return any(environment.get(name) for name in _OPENING)


def variables() -> dict[str, argparse.Action]:
    """The flags that have a meaning in another's process, by their variables."""
    return {
        PREFIX + name.upper(): action
        for name, action in _actions().items()
        if name not in _OF_OUR_PROCESS
    }


def settings_from_environment(environment: Mapping[str, str]) -> ServerSettings:
    """What these variables mean; the same checks as of the flags.

    A list is separated by white space; a switch is ``true`` or ``false``. An empty variable is
    as good as none, but for a key: one that went missing must not open the server.

    Raises:
        ValueError: names the variable that is wrong, never the value of a key.
    """
    actions = _actions()
    arguments: list[str] = []
    for variable in sorted(environment):
        value = environment[variable]
        if not variable.startswith(PREFIX) or variable in _OTHERS:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in actions or variable != variable.upper():
            raise ValueError(f"{variable} is not a setting of the server")
        if name in _OF_OUR_PROCESS:
            raise ValueError(f"{variable} has no effect: {_OF_OUR_PROCESS[name]}")
        if name != "api_key" and value:
            arguments += _flag(variable, actions[name], value)
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_server_arguments(parser)
    return server_settings(parser.parse_args(arguments), environment)


def _actions() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    add_server_arguments(parser)
    return {action.dest: action for action in parser._actions}


def _flag(variable: str, action: argparse.Action, value: str) -> list[str]:
    """The variable as words of a command line that argparse takes."""
    flag = action.option_strings[0]
    if isinstance(action, argparse.BooleanOptionalAction):
        if value.lower() not in _SWITCH:
            raise ValueError(f"{variable}: {value!r} is neither true nor false")
        return [flag if _SWITCH[value.lower()] else "--no-" + flag.removeprefix("--")]
    words = [flag, *value.split()] if action.nargs == "+" else [f"{flag}={value}"]
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False, add_help=False)
    add_server_arguments(parser)
    try:
        parser.parse_args(words)
    except argparse.ArgumentError as error:
        raise ValueError(f"{variable}: {error.message}") from None
    return words
