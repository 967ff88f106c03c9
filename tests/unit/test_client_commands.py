"""The commands as an operator runs them: real processes, their output and their exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from google.protobuf import json_format

from openengine_vllm.client.chat_template import load_chat_tokenizer
from openengine_vllm.client.commands import COMMANDS
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from tests.support.certificates import Authority, self_signed
from tests.support.chat import CHATML, write_tokenizer
from tests.support.scripted import Context, ScriptedServer, scripted_server

PROGRAM = [
    sys.executable,
    "-c",
    "import sys; from openengine_vllm.client.commands import main; sys.exit(main(sys.argv[1:]))",
]
BOUND = 60
"""Seconds after which a process counts as hanging."""


class Result(NamedTuple):
    code: int
    out: str
    err: str


async def start(
    *arguments: str,
    stdin: int | None = None,
    stdout: int = asyncio.subprocess.PIPE,
    environment: Mapping[str, str] | None = None,
) -> asyncio.subprocess.Process:
    kept = {key: os.environ[key] for key in os.environ if not key.startswith("OPENENGINE_")}
    return await asyncio.create_subprocess_exec(
        *PROGRAM,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
        env={**kept, "PYTHONUTF8": "1", **(environment or {})},
    )


async def run(
    *arguments: str, given: bytes = b"", environment: Mapping[str, str] | None = None
) -> Result:
    process = await start(*arguments, stdin=asyncio.subprocess.PIPE, environment=environment)
    async with asyncio.timeout(BOUND):
        out, err = await process.communicate(given)
    assert process.returncode is not None
    return Result(process.returncode, out.decode(), err.decode())


async def ends(process: asyncio.subprocess.Process) -> Result:
    """The end of a process whose output is not read any more."""
    assert process.stderr is not None
    async with asyncio.timeout(BOUND):
        err = await process.stderr.read()
        return Result(await process.wait(), "", err.decode())


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as scripted:
        yield scripted


def token(text: str, index: int = 0) -> pb.GenerateResponse:
    info = pb.TokenInfo(token_id=7, token=text)
    return pb.GenerateResponse(token=pb.TokenOutput(output_index=index, tokens=[info], text=text))


def finished(index: int = 0, *, last: bool = True) -> pb.GenerateResponse:
    usage = pb.Usage(prompt_tokens=3, completion_tokens=2, total_tokens=5, cached_prompt_tokens=0)
    end = pb.GenerationFinished(output_index=index, reason=pb.FINISH_REASON_LENGTH)
    return pb.GenerateResponse(finished=end, usage=usage if last else None)


def request_of(server: ScriptedServer) -> pb.GenerateRequest:
    [request] = [request for rpc, request in server.requests if rpc == "Generate"]
    assert isinstance(request, pb.GenerateRequest)
    return request


async def test_generate_prints_text_and_a_summary(server: ScriptedServer) -> None:
    server.stream("Generate", token("Grüße, "), token("Welt\n"), token("!"), finished())
    result = await run("generate", "the prompt", "--target", server.target)
    assert result == Result(
        0, "Grüße, Welt\n!", "finished: length; tokens: 3 prompt (0 cached) + 2 completion = 5\n"
    )
    request = request_of(server)
    assert request.prompt == "the prompt"
    assert request.request_id
    assert not request.HasField("sampling")
    assert not request.HasField("stopping")


async def test_text_is_there_before_the_next_token_is(server: ScriptedServer) -> None:
    seen = asyncio.Event()

    async def script(request: object, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        yield token("a")
        await seen.wait()
        yield token("b")
        yield finished()

    server.scripts["Generate"] = script
    process = await start("generate", "p", "--target", server.target)
    assert process.stdout is not None
    async with asyncio.timeout(BOUND):
        assert await process.stdout.read(10) == b"a"
        seen.set()
        assert await process.stdout.read() == b"b"
        assert await process.wait() == 0


async def test_no_stream_prints_once(server: ScriptedServer) -> None:
    server.stream("Generate", token("a"), token("b"), finished())
    result = await run("generate", "p", "--no-stream", "--target", server.target)
    assert (result.code, result.out) == (0, "ab")


async def test_several_outputs_are_printed_apart(server: ScriptedServer) -> None:
    server.stream(
        "Generate", token("x", 1), token("a"), finished(last=False), token("y", 1), finished(1)
    )
    result = await run("generate", "p", "--n", "2", "--target", server.target)
    assert result.code == 0
    assert result.out == "--- output 0 (length)\na\n--- output 1 (length)\nxy\n"
    assert result.err.startswith("finished: length, length; tokens: 3 prompt")


async def test_a_prefill_engine_gives_a_session(server: ScriptedServer) -> None:
    ready = pb.PrefillReady(kv_session=pb.KvSessionRef(session_id="s1"))
    server.stream("Generate", pb.GenerateResponse(prefill_ready=ready))
    result = await run("generate", "p", "--target", server.target)
    assert result == Result(0, "", "finished: prefill, KV session s1\n")


async def test_json_prints_every_response(server: ScriptedServer) -> None:
    responses = [token("ü"), finished()]
    server.stream("Generate", *responses)
    result = await run("generate", "p", "--json", "--target", server.target)
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert lines == [
        json_format.MessageToDict(response, preserving_proto_field_name=True)
        for response in responses
    ]
    assert lines[0]["token"]["tokens"][0]["token_id"] == 7
    assert (result.code, result.err) == (0, "")


async def test_every_option_reaches_the_request(server: ScriptedServer) -> None:
    server.stream("Generate", finished(), finished(1))
    command = (
        "generate --token-ids 1,2,3 --model m --lora-name l --request-id r --priority -5 "
        "--cache-salt c --temperature 0 --top-p 0.5 --top-k -1 --min-p 0.1 "
        "--frequency-penalty 1 --presence-penalty -1 --repetition-penalty 1.1 "
        "--seed 18446744073709551615 --n 2 --max-tokens 9 --min-tokens 1 --stop A --stop B "
        "--stop-token-id 4 --stop-token-id 5 --ignore-eos --include-stop --logprobs 3 "
        "--choice yes --choice no"
    )
    await run(*command.split(), "--target", server.target)
    assert request_of(server) == pb.GenerateRequest(
        request_id="r",
        model="m",
        lora_name="l",
        priority=-5,
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        sampling=pb.SamplingParams(
            temperature=0,
            top_p=0.5,
            top_k=-1,
            min_p=0.1,
            frequency_penalty=1,
            presence_penalty=-1,
            repetition_penalty=1.1,
            seed=2**64 - 1,
            num_sequences=2,
        ),
        stopping=pb.StoppingOptions(
            max_tokens=9,
            min_tokens=1,
            ignore_eos=True,
            include_stop_in_output=True,
            conditions=[
                pb.StopCondition(stop_text="A"),
                pb.StopCondition(stop_text="B"),
                pb.StopCondition(stop_token_id=4),
                pb.StopCondition(stop_token_id=5),
            ],
        ),
        response=pb.ResponseOptions(
            return_output_logprobs=True, output_candidates=pb.CandidateTokenSelection(top_n=3)
        ),
        kv=pb.KvOptions(cache_salt="c"),
        guided=pb.GuidedDecoding(choice=pb.ChoiceConstraint(choices=["yes", "no"])),
    )


async def test_the_prompt_from_standard_input_is_taken_as_it_is(server: ScriptedServer) -> None:
    server.stream("Generate", finished())
    result = await run("generate", "-", "--target", server.target, given="ä\n\n".encode())
    assert result.code == 0
    assert request_of(server).prompt == "ä\n\n"


async def test_a_rejection_is_one_line(server: ScriptedServer) -> None:
    async def script(request: object, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        error = errors.invalid_argument("sampling.top_p", "must be\nin (0, 1]")
        await context.abort(error.status, error.message, error.trailing_metadata())
        yield pb.GenerateResponse()

    server.scripts["Generate"] = script
    result = await run("generate", "p", "--top-p", "5", "--target", server.target)
    assert result == Result(
        1, "", "error: INVALID_ARGUMENT: must be in (0, 1] (field sampling.top_p)\n"
    )


@pytest.mark.parametrize("mode", ["--stream", "--json"])
async def test_a_failure_keeps_what_came_before(server: ScriptedServer, mode: str) -> None:
    error = errors.overloaded("the queue is full", retry_after_ms=20)
    failed = pb.GenerateResponse(error=errors.to_proto(error))
    server.stream("Generate", token("a"), failed)
    result = await run("generate", "p", mode, "--target", server.target)
    assert result.code == 1
    assert "a" in result.out
    assert result.err == "error: OVERLOADED: the queue is full (try again after 20 ms)\n"


@pytest.mark.parametrize("mode", ["--stream", "--no-stream", "--json"])
async def test_a_stream_without_an_end_is_an_error(server: ScriptedServer, mode: str) -> None:
    server.stream("Generate", token("a"))
    result = await run("generate", "p", mode, "--target", server.target)
    assert result.code == 1
    assert "ended before output 0" in result.err


async def test_a_deadline(server: ScriptedServer) -> None:
    server.stream("Generate", token("a"), hold=True)
    result = await run("generate", "p", "--timeout", "0.5", "--target", server.target)
    assert result.code == 1
    assert result.err.startswith("error: DEADLINE_EXCEEDED: ")
    assert len(result.err.splitlines()) == 1


async def test_a_server_that_goes_away() -> None:
    async with scripted_server() as server:
        server.stream("Generate", token("a"), hold=True)
        process = await start("generate", "p", "--target", server.target)
        assert process.stdout is not None
        assert await process.stdout.read(10) == b"a"
    result = await ends(process)
    assert result.code == 1
    assert result.err.startswith("error: UNAVAILABLE: ")
    assert len(result.err.splitlines()) == 1


async def test_an_interrupt_cancels_the_rpc(server: ScriptedServer) -> None:
    server.stream("Generate", token("a"), hold=True)
    process = await start("generate", "p", "--target", server.target)
    assert process.stdout is not None
    async with asyncio.timeout(BOUND):
        assert await process.stdout.read(10) == b"a"
        process.send_signal(signal.SIGINT)
        result = await ends(process)
        await server.cancelled.wait()
    assert (result.code, result.err) == (130, "")


async def test_a_broken_pipe_ends_quietly(server: ScriptedServer) -> None:
    closed = asyncio.Event()

    async def script(request: object, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        yield token("a")
        await closed.wait()
        while True:
            yield token("b")
            await asyncio.sleep(0)

    server.scripts["Generate"] = script
    reading, writing = os.pipe()
    process = await start("generate", "p", "--target", server.target, stdout=writing)
    os.close(writing)
    assert await asyncio.to_thread(os.read, reading, 10) == b"a"
    os.close(reading)
    closed.set()
    result = await ends(process)
    assert (result.code, result.err) == (141, "")
    async with asyncio.timeout(BOUND):
        await server.cancelled.wait()


async def test_a_broken_pipe_of_one_line(server: ScriptedServer) -> None:
    server.answer("Health", pb.HealthResponse(state=pb.HEALTH_STATE_READY))
    reading, writing = os.pipe()
    os.close(reading)
    process = await start("health", "--target", server.target, stdout=writing)
    os.close(writing)
    assert await ends(process) == Result(141, "", "")


async def test_chat_sends_the_rendered_conversation_as_token_ids(
    server: ScriptedServer, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path, CHATML)
    server.stream("Generate", token("Hi"), finished())
    server.answer("GetEngineInfo", pb.EngineInfo(supported_models=["m"]))
    server.answer("GetModelInfo", pb.ModelInfo(model_id=str(tmp_path)))
    chat = load_chat_tokenizer(tmp_path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    arguments = ["generate", "Hello", "--chat", "--system", "Be brief.", "--target", server.target]

    assert (await run(*arguments, "--tokenizer", str(tmp_path))).out == "Hi"
    assert list(request_of(server).token_ids.ids) == chat.encode(messages)
    assert chat.tokenizer.decode(chat.encode(messages), skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )

    # The folder that the engine names, when it is on this machine.
    server.requests.clear()
    assert (await run(*arguments)).out == "Hi"
    rpcs = [rpc for rpc, _ in server.requests]
    # The first one asks for the revision.
    assert rpcs == ["GetEngineInfo", "GetEngineInfo", "GetModelInfo", "Generate"]
    request = server.requests[-1][1]
    assert isinstance(request, pb.GenerateRequest)
    assert list(request.token_ids.ids) == chat.encode(messages)


async def test_chat_without_a_template_to_be_had(server: ScriptedServer, tmp_path: Path) -> None:
    server.answer("GetModelInfo", pb.ModelInfo(model_id="org/no-such-model"))
    arguments = ["generate", "Hello", "--chat", "--model", "m", "--target", server.target]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = await run(*arguments, environment=offline)
    assert (result.code, result.out) == (2, "")
    assert "'org/no-such-model'" in result.err
    assert "--tokenizer" in result.err
    assert len(result.err.splitlines()) == 1

    result = await run(*arguments, "--tokenizer", str(tmp_path))
    assert result.code == 2
    assert "tokenizer.json" in result.err


async def test_chat_that_the_template_refuses(server: ScriptedServer, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "{{ raise_exception('no ' + messages[0].role + ' message') }}")
    arguments = ["generate", "Hello", "--chat", "--system", "s", "--target", server.target]
    result = await run(*arguments, "--tokenizer", str(tmp_path))
    assert (result.code, server.requests) == (2, [])
    assert "no system message" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "either a prompt or --token-ids"),
        (["generate", "p", "--token-ids", "1"], "either a prompt or --token-ids"),
        (["generate", "--token-ids", "1,x"], "integers"),
        (["generate", "--token-ids", "-1,2"], "expected one argument"),
        (["generate", "--token-ids=-1,2"], "ids"),
        (["generate", "--chat", "--token-ids", "1"], "--chat needs a prompt"),
        (["generate", "p", "--system", "s"], "--chat"),
        (["generate", "p", "--max-tokens", "-1"], "max_tokens"),
        (["generate", "p", "--seed", "18446744073709551616"], "seed"),
        (["generate", "p", "--regex", "a", "--json-schema", "{}"], "json_schema, regex"),
        (["generate", "p", "--timeout", "0"], "greater than 0"),
        (["health", "--timeout", "nan"], "greater than 0"),
        (["health", "--tls-cert", "x"], "--tls-key"),
        (["health", "--tls-ca", "/does/not/exist"], "/does/not/exist"),
        (["nonsense"], "nonsense"),
        ([], "COMMAND"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
async def test_a_wrong_command_line(arguments: list[str], message: str) -> None:
    result = await run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert "Traceback" not in result.err


async def test_a_prompt_that_is_not_unicode() -> None:
    result = await run("generate", "-", given=b"\xff\xfe")
    assert (result.code, result.err) == (2, "error: standard input is not UTF-8\n")
    result = await run("generate", os.fsdecode(b"\xff"))
    assert (result.code, result.err) == (2, "error: prompt: the text is not valid Unicode\n")


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (pb.HEALTH_STATE_READY, 0),
        (pb.HEALTH_STATE_STARTING, 3),
        (pb.HEALTH_STATE_DEGRADED, 3),
        (pb.HEALTH_STATE_DRAINING, 3),
        (pb.HEALTH_STATE_NOT_READY, 3),
        (pb.HEALTH_STATE_UNSPECIFIED, 3),
    ],
)
async def test_health_says_whether_it_is_ready(
    server: ScriptedServer, state: pb.HealthState.ValueType, code: int
) -> None:
    server.answer("Health", pb.HealthResponse(state=state))
    result = await run("health", "--target", server.target)
    name = pb.HealthState.Name(state).removeprefix("HEALTH_STATE_")
    assert result == Result(code, name + "\n", "")
    assert server.requests == [("Health", pb.HealthRequest())]


async def test_health_prints_its_checks(server: ScriptedServer) -> None:
    checks = [
        pb.HealthCheck(name="grpc", state=pb.HEALTH_STATE_READY),
        pb.HealthCheck(name="model", state=pb.HEALTH_STATE_STARTING, message="loading"),
    ]
    server.answer("Health", pb.HealthResponse(state=pb.HEALTH_STATE_STARTING, checks=checks))
    result = await run("health", "--probe", "--model", "m", "--target", server.target)
    assert result.out == "STARTING\n  grpc   READY\n  model  STARTING  loading\n"
    assert server.requests == [
        ("Health", pb.HealthRequest(include_inference_probe=True, model="m"))
    ]
    result = await run("health", "--json", "--target", server.target)
    assert result.code == 3
    assert json.loads(result.out)["checks"][1]["message"] == "loading"


async def test_health_of_nothing() -> None:
    result = await run("health", "--target", "127.0.0.1:1")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: UNAVAILABLE: ")
    assert len(result.err.splitlines()) == 1


async def test_the_target_and_the_key_from_the_environment(
    server: ScriptedServer, tmp_path: Path
) -> None:
    server.answer("Health", pb.HealthResponse(state=pb.HEALTH_STATE_READY))
    environment = {"OPENENGINE_TARGET": server.target, "OPENENGINE_API_KEY": "one"}
    assert (await run("health", environment=environment)).code == 0
    assert server.metadata["authorization"] == "Bearer one"
    file = tmp_path / "key"
    file.write_text("two\n")
    result = await run("health", "--api-key-file", str(file), environment=environment)
    assert result.code == 0
    assert server.metadata["authorization"] == "Bearer two"
    file.write_text("\nthree\nfour\n")
    assert (await run("health", "--api-key-file", str(file), environment=environment)).code == 0
    assert server.metadata["authorization"] == "Bearer three"
    assert (await run("health", "--api-key", "five", environment=environment)).code == 0
    assert server.metadata["authorization"] == "Bearer five"


async def test_a_key_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    file = ("--api-key-file", str(tmp_path / "empty"))
    assert await run("health", *file) == Result(2, "", f"error: {file[1]}: holds no key\n")
    result = await run("health", *file, "--api-key", "x")
    assert result == Result(2, "", "error: either --api-key or --api-key-file\n")


async def test_a_rejected_key_has_no_code_but_a_status(server: ScriptedServer) -> None:
    async def script(request: object, context: Context) -> pb.HealthResponse:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no or wrong API key")
        raise AssertionError

    server.scripts["Health"] = script
    result = await run("health", "--target", server.target)
    assert result == Result(1, "", "error: UNAUTHENTICATED: no or wrong API key\n")


async def test_tls(tmp_path: Path) -> None:
    key, certificate = self_signed(tmp_path)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    async with scripted_server(credentials=credentials) as server:
        server.answer("Health", pb.HealthResponse(state=pb.HEALTH_STATE_READY))
        trusting = ["--tls-ca", str(certificate), "--target", server.target]
        assert (await run("health", *trusting)).code == 0
        assert (await run("health", "--tls", "--target", server.target)).code == 1


async def test_a_certificate_of_the_client(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    key, certificate = authority.issue("server")
    roots = authority.certificate.read_bytes()
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())], roots, require_client_auth=True
    )
    async with scripted_server(credentials=credentials) as server:
        server.answer("Health", pb.HealthResponse(state=pb.HEALTH_STATE_READY))
        trusting = ["--tls-ca", str(authority.certificate), "--target", server.target]
        assert (await run("health", *trusting)).code == 1
        client_key, client_certificate = authority.issue("client")
        own = ["--tls-cert", str(client_certificate), "--tls-key", str(client_key)]
        assert (await run("health", *trusting, *own)).code == 0


async def test_info(server: ScriptedServer) -> None:
    engine = pb.EngineInfo(
        engine_name="vllm",
        role=pb.ENGINE_ROLE_AGGREGATED,
        supported_models=["m", "m2"],
        parallelism=pb.ParallelismInfo(data_parallel_rank=0),
        schema_revision=1,
    )
    model = pb.ModelInfo(
        model_id="org/m",
        supports_lora=False,
        generation=pb.GenerationCapabilities(
            guided_decoding=pb.GuidedDecodingCapabilities(
                supported=True,
                modes=[pb.GUIDED_DECODING_MODE_REGEX, pb.GUIDED_DECODING_MODE_JSON_OBJECT],
            )
        ),
    )
    server.answer("GetEngineInfo", engine)
    server.answer("GetModelInfo", model)
    result = await run("info", "--target", server.target, "--model", "m")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        "revision: openengine",
        "engine",
        "  engine_name: vllm",
        "  role: aggregated",
        "  supported_models: m, m2",
        "  parallelism",
        "    data_parallel_rank: 0",
        "  schema_revision: 1",
        "model m",
        "  model_id: org/m",
        "  generation",
        "    guided_decoding",
        "      supported: yes",
        "      modes: regex, json_object",
        "  supports_lora: no",
    ]
    result = await run("info", "--json", "--target", server.target)
    assert result.err == ""
    value = json.loads(result.out)
    assert value["revision"] == "openengine"
    assert value["engine"]["engine_name"] == "vllm"
    assert [model["model_id"] for model in value["models"]] == ["org/m", "org/m"]


async def test_info_warns_of_a_server_that_does_not_fit(server: ScriptedServer) -> None:
    server.answer("GetEngineInfo", pb.EngineInfo(schema_revision=2, minimum_client_revision=2))
    result = await run("info", "--target", server.target)
    assert result.out.splitlines() == [
        "revision: openengine",
        "engine",
        "  schema_revision: 2",
        "  minimum_client_revision: 2",
    ]
    assert result.err.startswith("warning: the server wants clients of schema revision 2")


@pytest.mark.parametrize("name", [*COMMANDS, ""])
async def test_help_names_the_exit_codes(name: str) -> None:
    result = await run(*filter(None, [name]), "--help")
    assert (result.code, result.err) == (0, "")
    assert "exit codes:" in result.out
    assert "openengine-vllm" in result.out


async def test_listing_the_commands_loads_none_of_them() -> None:
    program = (
        "import sys; from openengine_vllm.client.commands import COMMANDS;"
        "print({'grpc', *(c.module for c in COMMANDS.values())} & sys.modules.keys())"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out.strip() == b"set()"
