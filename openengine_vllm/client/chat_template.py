"""A model's own chat template, rendered and tokenized without transformers.

The contract takes prompts, not messages: whoever has a conversation renders it first. The
prompt goes out as token ids, because a template writes its special tokens itself and a server
that tokenized the text would put a second one in front. Templates come with models and are not
trusted: they run in jinja2's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

TOKENIZER_FILE: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
FILES: Final = (TOKENIZER_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE, TEMPLATE_FILE)
"""The files of a model folder that are read here, of which the last two may be missing."""

SPECIAL_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The names under which a template finds the tokenizer's special tokens."""

Message = Mapping[str, Any]
"""One turn of a conversation: `role`, `content`, and what else the template knows."""


class ChatTemplateError(Exception):
    """A model folder that can't be used for chat, or a conversation that its template refuses."""


@dataclass(frozen=True)
class ChatTokenizer:
    """A model's chat template together with its tokenizer."""

    template: jinja2.Template
    special_tokens: Mapping[str, str]
    tokenizer: Tokenizer

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as the model was trained to read it, ready for its answer.

        `variables` are further names for the template, such as `tools`. Raises
        ChatTemplateError when the template refuses the conversation.
        """
        names: dict[str, Any] = {"tools": None, "documents": None, **self.special_tokens}
        names |= variables
        try:
            return self.template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **names
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The token ids of the rendered conversation, with nothing added to them."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def load_chat_tokenizer(folder: Path) -> ChatTokenizer:
    """Reads a model folder. Raises ChatTemplateError when something in it is missing or broken."""
    config = _read_json(folder / CONFIG_FILE)
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ChatTemplateError(f"{folder} has no {TOKENIZER_FILE}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more special
        raise ChatTemplateError(f"{path} cannot be read: {error}") from error
    return ChatTokenizer(
        template=compile_template(_template_source(folder, config)),
        special_tokens=_special_tokens(_read_json(folder / SPECIAL_TOKENS_FILE) | config),
        tokenizer=tokenizer,
    )


def compile_template(source: str) -> jinja2.Template:
    """Compiles a template with what chat templates expect to find.

    That is whitespace control of blocks, `break` and `continue`, the `generation` block, a
    `tojson` that leaves text as it is, `raise_exception` and `strftime_now`. Raises
    ChatTemplateError for a syntax error.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template cannot be compiled: {error}") from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a model wrote, for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _template_source(folder: Path, config: Mapping[str, Any]) -> str:
    file = folder / TEMPLATE_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        # Several templates by name.
        template = {item["name"]: item["template"] for item in template}.get("default")
    if not isinstance(template, str):
        raise ChatTemplateError(f"the model in {folder} has no chat template")
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ChatTemplateError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
