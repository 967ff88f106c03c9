"""Chat templates give what transformers makes of the same folder, without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from openengine_vllm.client.chat_template import (
    ChatTemplateError,
    ChatTokenizer,
    Message,
    load_chat_tokenizer,
)
from tests.support.chat import CHATML, write_tokenizer

HEADERS = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
<|im_start|>system
Year: {{ strftime_now("%Y") if strftime_now is defined else "?" }}
{{ system_message }}<|im_end|>
{% for message in messages %}
    {%- if loop.index0 > 2 %}{% break %}{% endif %}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}{{ eos_token if message.role == 'assistant' else '' }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

TURNS = """\
{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate user/assistant') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% else %}
        {% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}"""

TOOLS = """\
{%- set ns = namespace(count=0) -%}
{% if tools is not none %}
# Tools
{% for tool in tools %}
{{ tool | tojson }}
{{ tool | tojson(indent=2) }}
{% endfor %}
{% endif %}
{% for message in messages %}
{% set ns.count = ns.count + 1 %}
{{ ns.count }} {{ message.role }}: {{ message.content }}{{ message.missing }}{{ pad_token }}
{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
{% endfor %}
documents: {{ documents is none }}
"""

SYSTEM: list[Message] = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": "Größe <b>&</b> 'quotes' 🦊"},
]
DIALOGUE: list[Message] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "Hello, world."},
    {"role": "user", "content": "{{ bos_token }} is not a template"},
]
CALLS: list[Message] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"b": "ü<"}}]},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "says “ü” & <more>"}}


def both(folder: Path, template: str) -> tuple[ChatTokenizer, Any]:
    write_tokenizer(folder, template)
    return load_chat_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("template", "messages", "variables"),
    [
        (CHATML, SYSTEM, {}),
        (CHATML, DIALOGUE, {}),
        (HEADERS, SYSTEM, {}),
        (HEADERS, DIALOGUE, {}),
        (TURNS, DIALOGUE, {}),
        (TOOLS, CALLS, {}),
        (TOOLS, CALLS, {"tools": [TOOL]}),
    ],
    ids=["chatml-1", "chatml-2", "headers-1", "headers-2", "turns", "tools-0", "tools-1"],
)
def test_same_text_and_tokens_as_transformers(
    tmp_path: Path,
    template: str,
    messages: Sequence[Message],
    variables: dict[str, Any],
    add_generation_prompt: bool,
) -> None:
    ours, theirs = both(tmp_path, template)
    options = {"add_generation_prompt": add_generation_prompt, **variables}
    text = theirs.apply_chat_template(list(messages), tokenize=False, **options)
    assert ours.render(messages, **options) == text
    ids = theirs.apply_chat_template(list(messages), return_dict=False, **options)
    assert ours.encode(messages, **options) == ids


def test_the_template_alone_writes_the_first_token(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, HEADERS)
    chat = load_chat_tokenizer(tmp_path)
    start = chat.tokenizer.token_to_id("<s>")
    assert start is not None
    assert chat.encode(SYSTEM)[:2] == [start, chat.tokenizer.token_to_id("<|im_start|>")]
    assert chat.encode(SYSTEM).count(start) == 1
    assert chat.tokenizer.encode(chat.render(SYSTEM)).ids[:2] == [start, start]


def test_the_date_is_todays(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "{{ strftime_now('%Y') }}")
    before = datetime.now().year
    year = int(load_chat_tokenizer(tmp_path).render(DIALOGUE))
    assert before <= year <= datetime.now().year


def test_a_template_in_the_configuration(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, None, chat_template=CHATML)
    in_config = load_chat_tokenizer(tmp_path).render(SYSTEM)
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    write_tokenizer(tmp_path, None, chat_template=named)
    assert load_chat_tokenizer(tmp_path).render(SYSTEM) == in_config
    assert in_config.startswith("<|im_start|>system\n")
    # A file of its own comes before it, as in transformers.
    write_tokenizer(tmp_path, "file", chat_template=CHATML)
    assert load_chat_tokenizer(tmp_path).render(SYSTEM) == "file"


def test_special_tokens_from_their_older_file(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "{{ bos_token }}{{ eos_token }}{{ unk_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "<unk>", "bos_token": "x"}')
    assert load_chat_tokenizer(tmp_path).render(DIALOGUE) == "<s></s><unk>"


def test_a_conversation_that_the_template_refuses(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, TURNS)
    chat = load_chat_tokenizer(tmp_path)
    with pytest.raises(ChatTemplateError, match="roles must alternate user/assistant"):
        chat.encode(SYSTEM)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / messages.foo }}",
    ],
)
def test_a_template_that_misbehaves(tmp_path: Path, template: str) -> None:
    write_tokenizer(tmp_path, template)
    with pytest.raises(ChatTemplateError, match="refused"):
        load_chat_tokenizer(tmp_path).render(DIALOGUE)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("chat_template.jinja", None, "has no chat template"),
        ("chat_template.jinja", "{% if %}", "cannot be compiled"),
    ],
)
def test_a_folder_with_something_wrong(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    write_tokenizer(tmp_path, CHATML)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ChatTemplateError, match=message):
        load_chat_tokenizer(tmp_path)
