"""The `info` command: what an engine and its models say about themselves."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from openengine_vllm.client.commands.running import (
    SUCCESS,
    add_connection_arguments,
    open_client,
    run_command,
)
from openengine_vllm.client.compatibility import incompatibility

DESCRIPTION = """\
Show what an engine and the models that it serves say about themselves, and the revision of the
schema in which they said it. What an engine doesn't report is left out, which is something else
than a zero."""

DEFAULT_TIMEOUT = 10.0
"""Seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `info`."""
    parser.add_argument("--model", metavar="NAME", help="show this model alone (default: all)")
    parser.add_argument(
        "--json",
        action="store_true",
        help='print one JSON object: {"revision": "", "engine": {}, "models": []}',
    )
    add_connection_arguments(parser, timeout=DEFAULT_TIMEOUT)


def run(args: argparse.Namespace) -> int:
    """Prints EngineInfo and a ModelInfo for each model."""
    return run_command(lambda: _info(args))


async def _info(args: argparse.Namespace) -> int:
    async with open_client(args) as client:
        engine = await client.engine_info()
        names = engine.supported_models if args.model is None else [args.model]
        models = [await client.model_info(name) for name in names]
    if (problem := incompatibility(engine)) is not None:
        print("warning:", problem, file=sys.stderr)
    if args.json:
        value = {
            "revision": client.revision,
            "engine": _dict(engine),
            "models": [_dict(model) for model in models],
        }
        print(json.dumps(value, ensure_ascii=False))
        return SUCCESS
    print("revision:", client.revision)
    print("engine")
    print(*_lines(engine, "  "), sep="\n")
    for name, model in zip(names, models, strict=True):
        print(f"model {name}")
        print(*_lines(model, "  "), sep="\n")
    return SUCCESS


def _dict(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def _lines(message: Message, indent: str) -> Iterator[str]:
    """Every field that is set, a line each, with submessages below their name."""
    for field, value in message.ListFields():
        if field.message_type is None:
            yield f"{indent}{field.name}: {_scalar(field, value)}"
            continue
        for item in value if field.is_repeated else [value]:
            yield f"{indent}{field.name}"
            yield from _lines(item, indent + "  ")


def _scalar(field: FieldDescriptor, value: Any) -> str:
    if field.is_repeated:
        return ", ".join(_text(field.enum_type, item) for item in value)
    return _text(field.enum_type, value)


def _text(enum: EnumDescriptor | None, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if enum is None or value not in enum.values_by_number:
        return str(value)
    return enum.values_by_number[value].name.removeprefix(_prefix(enum)).lower()


def _prefix(enum: EnumDescriptor) -> str:
    """What all names of an enum begin with: its own name in the style of constants."""
    name = enum.values_by_number[0].name
    return name.removesuffix("UNSPECIFIED")
