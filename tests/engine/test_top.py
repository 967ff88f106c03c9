"""`top` in a terminal, on an engine that runs and queues what the test knows of."""

from __future__ import annotations

import re

from openengine_vllm.client import generate_request
from openengine_vllm.protocol import v1 as pb
from tests.engine.peers import OPERATED_SLOTS, Peer
from tests.support.calls import ENDLESS_TOKENS, RunningCall
from tests.support.terminal import terminal

WAITING = 3
IDLE = "requests   0 running, 0 queued"
BUSY = f"requests   {OPERATED_SLOTS} running, {WAITING} queued"
BLOCKS = re.compile(r"kv blocks .* ([\d,]+)/([\d,]+) [\d.]+%")
RANK = re.compile(rf"^\W*0 +{OPERATED_SLOTS} +{WAITING} +0 +{OPERATED_SLOTS} .*%", re.MULTILINE)


def request(first: int) -> pb.GenerateRequest:
    prompt = list(range(first, first + 20))
    return generate_request(prompt, {"max_tokens": ENDLESS_TOKENS, "ignore_eos": True})


def used_blocks(text: str) -> int:
    match = BLOCKS.search(text)
    return int(match[1].replace(",", "")) if match else -1


async def test_the_screen_shows_what_runs_and_what_waits(operated: Peer) -> None:
    info = await operated.client.engine_info()
    async with terminal("top", "--target", operated.server.target, "--interval", "0.5") as shown:
        before = shown.settings()
        text = await shown.until(lambda text: IDLE in text and used_blocks(text) == 0)
        assert " READY " in text
        # A model's path may take a line of its own.
        words = " ".join(text.split())
        assert (
            f"model {info.supported_models[0]} role aggregated "
            f"engine vllm {info.engine_version} instance {info.instance_id}"
        ) in words

        calls = [RunningCall(operated.channel, request(30 * n)) for n in range(1, 3)]
        for call in calls:
            await call.tokens(2)
        calls += [RunningCall(operated.channel, request(30 * n)) for n in range(3, 3 + WAITING)]
        text = await shown.until(
            lambda text: (
                BUSY in text
                and RANK.search(text)
                and "FORWARD_PASS" in text
                and "generated" in text
                and not re.search(r"generated +0\.0 tok/s", text)
            )
        )
        assert f" running, {WAITING * 20} waiting" in text
        load = await operated.client.load()
        assert 0 < used_blocks(text) <= load.used_kv_blocks
        match = BLOCKS.search(text)
        assert match is not None
        assert match[2] == f"{load.total_kv_blocks:,}"

        shown.press("fff")
        await shown.until(lambda text: "events: queue" in text and "FORWARD_PASS" not in text)
        for call in calls:
            call.cancel()
            await call.end()
        await shown.until(lambda text: IDLE in text and "live_requests=0" in text)

        shown.press("q")
        assert await shown.end() == 0
        shown.read()
        assert shown.settings() == before
        assert shown.modes_left() == set()
