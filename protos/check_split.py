"""Compares the split revision's protos with the page that lists how it differs from the contract.

    python protos/check_split.py PAGE

Every message of the page is compared field by field, every other one with the contract's, and the
services method by method; what the page calls gone must be gone. Exits 1 and prints each
difference. Needs what protos/generate.py needs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from generate import CONTRACT, SPLIT, Revision, compile_descriptors
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

PACKAGE = "openengine.v1"
FIELD = re.compile(
    r"(?P<number>\d+) `(?P<name>\w+)` (?P<label>optional |repeated |oneof \w+: )?(?P<type>[\w.]+)"
)
METHOD = re.compile(r"(\w+)\((\w+)\) returns (stream )?(\w+)")

Facts: TypeAlias = dict[str, object]


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    page = Path(sys.argv[1]).read_text(encoding="utf-8")
    contract = {
        name: fact for name, fact in facts_of(CONTRACT).items() if not name.startswith("rpc ")
    }
    wanted = {name: fact for name, fact in contract.items() if not _is_of(name, gone(page))}
    told = dict(page_messages(page))
    wanted = {name: fact for name, fact in wanted.items() if not _is_of(name, set(told))}
    for name, fields in told.items():
        wanted[f"message {name}"] = ()
        wanted |= {f"message {name}.{field}": fact for field, fact in fields.items()}
    wanted |= page_methods(page)
    found = facts_of(SPLIT)
    differences = [
        f"{name}: page {wanted.get(name, 'absent')}, protos {found.get(name, 'absent')}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    print("\n".join(differences) or f"{len(found)} definitions match the page")
    return 1 if differences else 0


def _is_of(fact: str, names: set[str]) -> bool:
    return re.split(r"[ .]", fact)[1] in names


def gone(page: str) -> set[str]:
    """The names in the page's list of what is gone."""
    section = page.partition("\n## Gone\n")[2].partition("\n## ")[0]
    return set(re.findall(r"\w+", section)) - {"rpcs", "messages", "enums"}


def page_messages(page: str) -> Iterator[tuple[str, Facts]]:
    """Each message that the page lists, with its fields."""
    for name, text in re.findall(r"^\*\*(\w+)\*\* \((?:new|changed)\): (.*)$", page, re.MULTILINE):
        fields: Facts = {}
        for match in FIELD.finditer(text):
            label = (match["label"] or "").strip()
            kind = match["type"].rpartition(".")[2]
            fields[match["name"]] = (int(match["number"]), label.rstrip(":"), kind)
        if text != "no fields" and len(fields) != text.count(";") + 1:
            sys.exit(f"cannot read the page's list of {name}")
        yield name, fields


def page_methods(page: str) -> Facts:
    """The methods of both services."""
    section = page.partition("\n## Services\n")[2].partition("\n## ")[0]
    return {
        f"rpc {service}.{method}": (request, response, bool(stream))
        for service, text in re.findall(r"^- `(\w+)`: (.*)$", section, re.MULTILINE)
        for method, request, stream, response in METHOD.findall(text)
    }


def facts_of(revision: Revision) -> Facts:
    """What the revision's protos define."""
    facts: Facts = {}
    for file in compile_descriptors(revision):
        if file.package != PACKAGE:
            continue
        for message in file.message_type:
            facts[f"message {message.name}"] = ()
            for field in message.field:
                facts[f"message {message.name}.{field.name}"] = field_facts(message, field)
        for enum in file.enum_type:
            facts |= {f"enum {enum.name}.{value.name}": value.number for value in enum.value}
        for service in file.service:
            for method in service.method:
                facts[f"rpc {service.name}.{method.name}"] = (
                    method.input_type.rpartition(".")[2],
                    method.output_type.rpartition(".")[2],
                    method.server_streaming,
                )
    return facts


def field_facts(message: DescriptorProto, field: FieldDescriptorProto) -> tuple[int, str, str]:
    """Number, label and type as the page writes them."""
    if field.label == field.LABEL_REPEATED:
        label = "repeated"
    elif field.proto3_optional:
        label = "optional"
    elif field.HasField("oneof_index"):
        label = f"oneof {message.oneof_decl[field.oneof_index].name}"
    else:
        label = ""
    if field.type_name:
        kind = field.type_name.rpartition(".")[2]
    else:
        kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return field.number, label, kind


if __name__ == "__main__":
    sys.exit(main())
