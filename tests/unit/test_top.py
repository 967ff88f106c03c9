"""`top`: what it makes of a server's answers, and the screen that it draws."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from textual.widgets import DataTable

from openengine_vllm.client import Client
from openengine_vllm.client.commands.top import lines
from openengine_vllm.client.commands.top.monitor import HISTORY_SECONDS, Link, Monitor
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from tests.support.calls import PATIENCE_SECONDS, eventually
from tests.support.scripted import Context, ScriptedServer, scripted_server
from tests.unit.live_server import live_server
from tests.unit.test_client_commands import run
from tests.unit.top_screen import (
    PICTURE,
    START,
    TEXT,
    Time,
    document_with,
    drawn,
    engine_at,
    shown,
    step,
    subscribed,
)

READY = pb.HealthResponse(state=pb.HEALTH_STATE_READY)
WRITE = "out of date: python -m tests.unit.top_screen --write"


async def test_the_documents_show_what_is_drawn() -> None:
    picture, text = await drawn()
    assert PICTURE.read_text(encoding="utf-8") == picture, WRITE
    assert TEXT.read_text(encoding="utf-8") == document_with(text), WRITE


async def test_figures_of_a_live_server() -> None:
    time = Time()
    async with engine_at(time) as live, shown(live.address, time) as screen:
        await subscribed(live)
        step(live, 1, running=2, queued=3, prefill=1, usage=0.25, tokens=100)
        await screen.happened(pb.RUNTIME_EVENT_TYPE_QUEUE, START)
        await time.tick()
        text = await screen.text()
    for expected in (
        "127.0.0.1:50051   READY   08:00:05 UTC, every 5 s",
        "model demo   role aggregated   engine vllm 0.32.0   instance 6f1d0a52c3",
        "requests   2 running, 3 queued",
        "tokens  240 running, 240 waiting",
        "batch      1 prefill, 1 decode",
        "cache   40.0% hits, 0 preemptions",
        "256/1,024 25.0%",
        "generated       10.0 tok/s",
        "prompt           8.0 tok/s",
        "    0        2       3        1       1  █████████░",
        "events: all types, 3 seen",
        "08:00:00.000000  QUEUE         deferred_requests=0 queue=engine queued_requests=3 rank=0",
    ):
        assert expected in text, text


async def test_an_engine_that_reports_little() -> None:
    async with scripted_server() as server:
        server.answer("Health", READY)
        server.answer("GetLoad", pb.LoadInfo(running_requests=0))
        async with shown(server.target, Time()) as screen:
            await screen.time.tick()
            text = await screen.text()
    assert "READY" in text
    assert "requests   0 running, - queued" in text
    assert "cache   - hits, - preemptions" in text
    assert "kv blocks  -/-" in text
    assert "is not implemented" in text, "why there are no events"


async def test_a_server_that_goes_and_comes_back(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    async with shown(address, Time()) as screen:
        assert " AWAY " in await screen.text()
        assert "no answer since 08:00:00 UTC; connects again by itself" in await screen.text()
        async with scripted_server(address) as server:
            server.answer("Health", READY)
            server.answer("GetLoad", pb.LoadInfo(instance_id="a", running_requests=7))
            server.answer("GetEngineInfo", pb.EngineInfo(instance_id="a"))
            await screen.ticks_until(" READY ")
            assert "instance a" in await screen.text()
        await screen.ticks_until(" AWAY ")
        assert "requests   7 running" in await screen.text(), "the last figures stay"
        assert screen.app.query_one("#figures").has_class("stale")
        async with scripted_server(address) as server:
            server.answer("Health", READY)
            server.answer("GetLoad", pb.LoadInfo(instance_id="b", running_requests=1))
            server.answer("GetEngineInfo", pb.EngineInfo(instance_id="b"))
            await screen.ticks_until(" READY ")
            assert "instance b" in await screen.text()
            assert not screen.app.query_one("#figures").has_class("stale")


async def test_a_server_that_drains() -> None:
    time = Time()
    async with engine_at(time) as live, shown(live.address, time) as screen:
        async with Client(live.address) as client:
            assert [r async for r in client.drain()][-1].state == pb.DRAIN_STATE_COMPLETE
        await time.tick()
        text = await screen.text()
        assert " DRAINING " in text
        assert "finishing what runs; no new work is taken" in text
        assert "requests   0 running, 0 queued" in text, "the load is still to be had"


async def test_a_server_that_starts(tmp_path: Path) -> None:
    async with scripted_server() as server:
        check = pb.HealthCheck(
            name="model", state=pb.HEALTH_STATE_STARTING, message="the model is loading"
        )
        starting = pb.HealthResponse(state=pb.HEALTH_STATE_STARTING, checks=[check])
        server.answer("Health", starting)
        async with shown(server.target, Time()) as screen:
            text = await screen.text()
            assert " STARTING " in text
            assert "model: the model is loading" in text
            assert "requests   - running, - queued" in text
        assert "GetLoad" not in [name for name, _ in server.requests]


async def test_a_server_that_wants_a_key() -> None:
    async with live_server("--api-key", "secret") as live, shown(live.address, Time()) as screen:
        text = await screen.text()
        assert " REFUSED " in text
        assert "UNAUTHENTICATED: a valid API key is required; start with --api-key-file" in text


async def test_a_server_that_fails() -> None:
    async def fail(request: object, context: Context) -> None:
        error = errors.internal("broken")
        await context.abort(error.status, error.message, error.trailing_metadata())

    async with scripted_server() as server:
        server.scripts["Health"] = fail
        async with shown(server.target, Time()) as screen:
            assert " FAILED " in await screen.text()
            assert "since 08:00:00 UTC: INTERNAL: broken" in await screen.text()


def types_asked(server: ScriptedServer) -> list[list[int]]:
    return [
        list(request.types)
        for _, request in server.requests
        if isinstance(request, pb.SubscribeRuntimeEventsRequest)
    ]


async def test_the_filter_of_events() -> None:
    events = [
        pb.SubscribeRuntimeEventsResponse(
            runtime_event=pb.RuntimeEvent(
                type=kind,
                timestamp_unix_nanos=int(START * 1e9),
                attributes={"text": "[b]not markup[/b]"},
            )
        )
        for kind in (pb.RUNTIME_EVENT_TYPE_FORWARD_PASS, pb.RUNTIME_EVENT_TYPE_QUEUE)
    ]
    async with scripted_server() as server:
        server.answer("Health", READY)
        server.stream("SubscribeRuntimeEvents", *events, hold=True)
        async with shown(server.target, Time()) as screen:
            await screen.happened(pb.RUNTIME_EVENT_TYPE_QUEUE, START)
            await screen.time.tick()
            text = await screen.text()
            assert "events: all types, 2 seen" in text
            assert "FORWARD_PASS  text=[b]not markup[/b]" in text
            server.stream("SubscribeRuntimeEvents", hold=True)
            for name, kind in (
                ("forward-pass", "FORWARD_PASS"),
                ("batch", ""),
                ("queue", "QUEUE"),
                ("transfer", ""),
            ):
                await screen.pilot.press("f")
                text = await screen.text()
                assert f"events: {name}, 2 seen" in text
                shown_kinds = {k for k in ("FORWARD_PASS", "QUEUE") if f"{k} " in text}
                assert shown_kinds == ({kind} if kind else set())
            await screen.pilot.press("f")
            assert "events: all types" in await screen.text()
            await eventually(
                lambda: len(types_asked(server)) > 1 and types_asked(server)[-1] == [],
                "the server is asked for all types again",
            )


async def test_events_of_one_type_from_the_start() -> None:
    async with scripted_server() as server:
        server.answer("Health", READY)
        server.stream("SubscribeRuntimeEvents", hold=True)
        async with shown(server.target, Time(), [pb.RUNTIME_EVENT_TYPE_BATCH]) as screen:
            assert "events: batch, 0 seen" in await screen.text()
            await eventually(lambda: types_asked(server), "the server is asked for events")
            assert types_asked(server) == [[pb.RUNTIME_EVENT_TYPE_BATCH]]


async def test_a_pause_hides_what_goes_on() -> None:
    time = Time()
    async with engine_at(time) as live, shown(live.address, time) as screen:
        await screen.pilot.press("p")
        assert "PAUSED" in await screen.text()
        step(live, 1, running=4)
        await time.tick()
        assert "requests   0 running" in await screen.text()
        assert len(screen.app.monitor.history) == 2, "the curve has no gap"
        await screen.pilot.press("p")
        text = await screen.text()
        assert "PAUSED" not in text
        assert "requests   4 running" in text


async def test_the_interval() -> None:
    async with scripted_server() as server:
        server.answer("Health", READY)
        async with shown(server.target, Time()) as screen:
            for key, seconds in (("plus", "10"), ("minus", "5"), ("minus", "2")):
                await screen.pilot.press(key)
                assert f"every {seconds} s" in await screen.text()
            for _ in range(10):
                await screen.pilot.press("minus")
            assert "every 0.2 s" in await screen.text()


async def test_the_help_and_the_end() -> None:
    async with scripted_server() as server:
        server.answer("Health", READY)
        async with shown(server.target, Time()) as screen:
            await screen.pilot.press("question_mark")
            assert "pause: the screen stands still" in await screen.text()
            await screen.pilot.press("x")
            assert "pause: the screen stands still" not in await screen.text()
            await screen.pilot.press("q")
            assert screen.app.return_value == 0


async def test_ctrl_c_ends_it() -> None:
    async with scripted_server() as server:
        server.answer("Health", READY)
        async with shown(server.target, Time()) as screen:
            await screen.pilot.press("ctrl+c")
            assert screen.app.return_value == 130


async def test_many_events_are_followed_and_bounded() -> None:
    async with scripted_server() as server:
        server.answer("Health", READY)
        many = [
            pb.SubscribeRuntimeEventsResponse(
                runtime_event=pb.RuntimeEvent(
                    type=pb.RUNTIME_EVENT_TYPE_BATCH,
                    timestamp_unix_nanos=int(START * 1e9),
                    attributes={"number": str(number)},
                )
            )
            for number in range(3000)
        ]
        server.stream("SubscribeRuntimeEvents", *many, hold=True)
        async with shown(server.target, Time()) as screen:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while screen.app.monitor.events_seen < len(many):
                    await screen.time.tick()
            await screen.ticks_until("number=2999")
            assert "3,000 seen" in await screen.text()
            await screen.pilot.press("ctrl+home")
            assert "number=2999" not in await screen.text()
            await screen.time.tick()
            assert "number=2999" not in await screen.text(), "who looks back is left alone"
            await screen.pilot.press("ctrl+end")
            assert "number=2999" in await screen.text()
            assert screen.app.query_one("#events", DataTable).row_count <= 1000


def test_a_bar_is_empty_for_nothing_and_full_for_all() -> None:
    shapes = {share: lines.plain([lines.bar(share, 4, "good")])[0] for share in (0, 0.001, 0.5)}
    assert shapes == {0: "░░░░", 0.001: "█░░░", 0.5: "██░░"}
    assert lines.plain([lines.bar(0.999, 4, "good"), lines.bar(1, 4, "good")]) == ["███░", "████"]


@pytest.mark.parametrize(
    ("share", "style"), [(0.1, "good"), (0.7, "warn"), (0.89, "warn"), (0.9, "bad"), (1.0, "bad")]
)
def test_a_fuller_cache_has_another_colour(share: float, style: str) -> None:
    assert lines.blocks(round(share * 100), 100, 10)[0][1] == style


def test_a_curve_is_blank_where_nothing_is_known() -> None:
    points = [(100.0, 0.0), (101.0, 7.0), (103.0, 14.0), (104.5, 4.0), (104.9, 6.0), (105.0, None)]
    assert lines.sparkline(points, 105.0, 6, 6) == "▁▅ █▄ "
    assert lines.sparkline(points, 105.9, 6, 6) == "▁▅ █▄ ", "columns do not shift"
    assert lines.sparkline(points, 106.0, 6, 6) == "▅ █▄  "
    assert lines.sparkline([], 106.0, 6, 6) == " " * 6
    assert lines.sparkline([(1.0, 0.0)], 1.0, 2, 2) == " ▁"


def test_history_is_bounded_in_time() -> None:
    monitor = Monitor()
    for second in range(2 * HISTORY_SECONDS):
        monitor.answered(None, None, pb.LoadInfo(), float(second))
    assert len(monitor.history) == HISTORY_SECONDS
    monitor.failed(errors.overloaded("busy"), 10.0 * HISTORY_SECONDS)
    assert not monitor.history


def test_since_when_it_is_so() -> None:
    monitor = Monitor()
    for at in (1.0, 2.0, 3.0):
        monitor.failed(errors.engine_dead(), at)
    assert (monitor.link, monitor.since) == (Link.AWAY, 1.0)
    monitor.answered(None, None, None, 4.0)
    assert (monitor.link, monitor.since, monitor.problem) == (Link.UP, 4.0, "")
    assert lines.state(monitor)[0] == "UP"


def test_an_attribute_that_is_no_number_is_not_known() -> None:
    monitor = Monitor()
    load = pb.LoadInfo(attributes={"generation_tokens_per_second": "many"})
    monitor.answered(READY, None, load, 0.0)
    assert any("generated" in text and "- tok/s" in text for text in _figures(monitor))


def _figures(monitor: Monitor) -> list[str]:
    return lines.plain(lines.figures(monitor, 0.0, 80))


def test_all_ranks_fit_into_a_narrow_terminal() -> None:
    rank = pb.RankLoadInfo(data_parallel_rank=127, used_kv_blocks=100_000, total_kv_blocks=999_999)
    monitor = Monitor()
    monitor.answered(READY, None, pb.LoadInfo(ranks=[rank] * 3), 0.0)
    rows = lines.plain(lines.ranks(monitor, 74))
    assert len(rows) == 4
    assert max(map(len, [*rows, *_figures(monitor)])) <= 80


async def test_it_wants_a_terminal() -> None:
    result = await run("top")
    assert result == (2, "", "error: top wants a terminal; load --watch --json is for scripts\n")


def test_without_textual_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['textual'] = sys.modules['textual.app'] = None\n"
        "from openengine_vllm.client.commands import main; sys.exit(main(['top']))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: top needs Textual (textual")
    assert result.stderr.endswith("is missing): pip install 'openengine-vllm[top]'\n")


@pytest.mark.parametrize("seconds", ["0", "0.01", "4000", "nan", "soon"])
async def test_it_takes_no_such_interval(seconds: str) -> None:
    result = await run("top", f"--interval={seconds}")
    assert result.code == 2
    assert "argument --interval: must be " in result.err


@pytest.mark.parametrize("command", ["top", "load", "health", "events", "generate"])
def test_help_comes_without_textual(command: str) -> None:
    program = (
        "import sys; from openengine_vllm.client.commands import main\n"
        f"try: main([{command!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('textual' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
