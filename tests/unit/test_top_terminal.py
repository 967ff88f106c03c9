"""`top` as a program in a terminal: how it ends, and what it leaves there."""

from __future__ import annotations

import signal

import pytest

from openengine_vllm.protocol import v1 as pb
from tests.support.scripted import scripted_server
from tests.support.terminal import Terminal, terminal


def press_q(shown: Terminal) -> None:
    shown.press("q")


def press_ctrl_c(shown: Terminal) -> None:
    shown.press("\x03")


def interrupt(shown: Terminal) -> None:
    shown.process.send_signal(signal.SIGINT)


def terminate(shown: Terminal) -> None:
    shown.process.terminate()


@pytest.mark.parametrize(
    ("end", "code"), [(press_q, 0), (press_ctrl_c, 130), (interrupt, 130), (terminate, 143)]
)
async def test_every_end_restores_the_terminal(end: object, code: int) -> None:
    assert callable(end)
    async with scripted_server() as server:
        server.answer("Health", pb.HealthResponse(state=pb.HEALTH_STATE_READY))
        server.answer("GetLoad", pb.LoadInfo(running_requests=3, queued_requests=4))
        async with terminal("top", "--target", server.target) as shown:
            before = shown.settings()
            await shown.until(lambda text: "3 running, 4 queued" in text and "quit" in text)
            assert shown.settings() != before
            assert shown.modes_left()
            end(shown)
            assert await shown.end() == code
            shown.read()
            assert shown.settings() == before
            assert shown.modes_left() == set()
            assert b"Traceback" not in shown.output


async def test_a_server_that_is_away() -> None:
    async with terminal("top", "--target", "127.0.0.1:1") as shown:
        await shown.until(lambda text: "AWAY" in text and "connects again by itself" in text)
        shown.press("q")
        assert await shown.end() == 0
