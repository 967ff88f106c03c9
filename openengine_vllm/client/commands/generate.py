"""The `generate` command: a prompt in, text as it comes out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

from openengine_vllm.client import Client, Completion, GenerateOptions, generate_request
from openengine_vllm.client.commands.chat import chat_prompt
from openengine_vllm.client.commands.running import (
    SUCCESS,
    UsageError,
    add_connection_arguments,
    open_client,
    print_json,
    run_command,
)
from openengine_vllm.client.requests import Prompt
from openengine_vllm.client.results import Collector
from openengine_vllm.protocol import v1 as pb

DESCRIPTION = """\
Generate from a prompt. The text goes to standard output as it comes; how it ended and what it
cost go to standard error, as one line. An option that isn't given is left to the model."""

# Options of the command that are options of the request, under the same name.
_REQUEST_OPTIONS = (
    "request_id",
    "model",
    "lora_name",
    "priority",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "num_sequences",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_in_output",
    "output_logprobs",
    "json_schema",
    "regex",
    "choices",
    "cache_salt",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `generate`."""
    parser.add_argument(
        "prompt", nargs="?", help="the prompt; - reads all of standard input, last newline included"
    )
    parser.add_argument("--token-ids", type=_ids, metavar="ID,ID,...", help="a prompt as token ids")
    _add_chat_arguments(parser)
    _add_request_arguments(parser)
    _add_sampling_arguments(parser)
    _add_stopping_arguments(parser)
    _add_output_arguments(parser)
    add_connection_arguments(parser)


def _add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("chat")
    group.add_argument(
        "--chat", action="store_true", help="put the prompt into the model's own chat template"
    )
    group.add_argument("--system", metavar="TEXT", help="system message of the chat")
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder with the model's tokenizer and chat template (default: the model that the "
        "engine names, from this disk or from the hub)",
    )


def _add_request_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("request")
    group.add_argument("--model", metavar="NAME", help="served model (default: the engine's own)")
    group.add_argument("--lora-name", metavar="NAME", help="LoRA adapter that is loaded")
    group.add_argument("--request-id", metavar="ID", help="id of the request (default: made up)")
    group.add_argument("--priority", type=int, metavar="N", help="larger is sooner")
    group.add_argument("--cache-salt", metavar="TEXT", help="share cached prefixes under it alone")
    group.add_argument("--json-schema", metavar="JSON", help="have the output match a JSON schema")
    group.add_argument("--regex", metavar="RE", help="have the output match a regular expression")
    group.add_argument(
        "--choice",
        dest="choices",
        action="append",
        metavar="TEXT",
        help="have the output be one of these; repeat it for each",
    )


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, metavar="X", help="0 takes the likeliest token")
    group.add_argument("--top-p", type=float, metavar="X")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--min-p", type=float, metavar="X")
    group.add_argument("--frequency-penalty", type=float, metavar="X")
    group.add_argument("--presence-penalty", type=float, metavar="X")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--seed", type=int, metavar="N")
    group.add_argument(
        "--n", dest="num_sequences", type=int, metavar="N", help="number of outputs (default: 1)"
    )


def _add_stopping_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("stopping")
    group.add_argument("--max-tokens", type=int, metavar="N")
    group.add_argument("--min-tokens", type=int, metavar="N")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop at a text; repeat it for more"
    )
    group.add_argument(
        "--stop-token-id",
        dest="stop_token_ids",
        action="append",
        type=int,
        metavar="ID",
        help="stop at a token; repeat it for more",
    )
    group.add_argument("--ignore-eos", action="store_const", const=True, help="go on after the end")
    group.add_argument(
        "--include-stop",
        dest="include_stop_in_output",
        action="store_const",
        const=True,
        help="leave the stop in the output",
    )


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print text as it comes (default); several outputs are printed at the end",
    )
    group.add_argument(
        "--json", action="store_true", help="print every response as a line of JSON instead"
    )
    group.add_argument(
        "--logprobs",
        dest="output_logprobs",
        type=int,
        metavar="N",
        help="ask for logprobs, with N candidates a token; to be seen with --json",
    )


def run(args: argparse.Namespace) -> int:
    """Generates, prints, and returns the exit code."""
    return run_command(lambda: _generate(args))


async def _generate(args: argparse.Namespace) -> int:
    prompt = _prompt(args)
    async with open_client(args) as client:
        if args.chat:
            prompt = await chat_prompt(client, prompt, args.system, args.model, args.tokenizer)
        try:
            request = generate_request(prompt, _options(args))
        except ValueError as error:
            raise UsageError(str(error)) from error
        live = args.stream and request.sampling.num_sequences <= 1
        show = print_json if args.json else _print_text if live else None
        completion = await _complete(client, request, show)
    if not args.json:
        _print_rest(completion, live)
    return SUCCESS


async def _complete(
    client: Client, request: pb.GenerateRequest, show: Callable[[pb.GenerateResponse], None] | None
) -> Completion:
    collector = Collector.for_request(request)
    async with aclosing(client.generate(request)) as responses:
        async for response in responses:
            if show is not None:
                show(response)
            collector.add(response)
    return collector.result()


def _print_text(response: pb.GenerateResponse) -> None:
    if response.token.text:
        print(response.token.text, end="", flush=True)


def _print_rest(completion: Completion, live: bool) -> None:
    match completion.outputs:
        case [output]:
            if not live:
                print(output.text, end="", flush=True)
            _end_line(output.text)
        case outputs:
            for output in outputs:
                print(f"--- output {output.index} ({output.reason_name})\n{output.text}")
    _print_summary(completion)


def _end_line(text: str) -> None:
    """Ends the last line on a terminal; anywhere else the text stays what the model wrote."""
    if sys.stdout is not None and sys.stdout.isatty() and not text.endswith("\n"):
        print(flush=True)


def _print_summary(completion: Completion) -> None:
    reasons = [output.reason_name for output in completion.outputs]
    if completion.kv_session is not None:
        reasons.append(f"prefill, KV session {completion.kv_session.session_id}")
    line = "finished: " + ", ".join(reasons)
    if (usage := completion.usage) is not None:
        line += f"; tokens: {usage.prompt_tokens} prompt"
        if usage.HasField("cached_prompt_tokens"):
            line += f" ({usage.cached_prompt_tokens} cached)"
        line += f" + {usage.completion_tokens} completion"
        if usage.HasField("reasoning_tokens"):
            line += f" ({usage.reasoning_tokens} reasoning)"
        line += f" = {usage.total_tokens}"
    print(line, file=sys.stderr)


def _prompt(args: argparse.Namespace) -> Prompt:
    if (args.prompt is None) == (args.token_ids is None):
        raise UsageError("give either a prompt or --token-ids")
    if args.chat and args.prompt is None:
        raise UsageError("--chat needs a prompt as text")
    if not args.chat and (args.system is not None or args.tokenizer is not None):
        raise UsageError("--system and --tokenizer go with --chat")
    if args.prompt is None:
        return cast(list[int], args.token_ids)
    if args.prompt != "-":
        return cast(str, args.prompt)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError("standard input is not UTF-8") from error


def _options(args: argparse.Namespace) -> GenerateOptions:
    given: dict[str, Any] = {name: getattr(args, name) for name in _REQUEST_OPTIONS}
    return cast(
        GenerateOptions, {name: value for name, value in given.items() if value is not None}
    )


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError("must be integers with commas between them") from None
