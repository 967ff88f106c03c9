"""Who gets past the keys of the HTTP server."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest

from openengine_vllm.api_keys import ApiKeys
from openengine_vllm.http_keys import KeyCheck

BEARER = (b"authorization", b"Bearer secret")


async def ask(path: str, *headers: tuple[bytes, bytes], **scope: Any) -> list[Any]:
    """What is sent to a caller; ``through`` stands for the app behind the check."""
    sent: list[Any] = []

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        sent.append("through")

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nothing is read")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    check = KeyCheck(app, ApiKeys(["other", "secret"]))
    await check(
        {"type": "http", "method": "POST", "path": path, "headers": headers, **scope},
        receive,
        send,
    )
    return sent


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/completions", [BEARER]),
        ("/metrics", [(b"authorization", b"bearer other")]),
        ("/health", []),
        ("/ping", []),
    ],
)
async def test_who_is_let_in(path: str, headers: list[tuple[bytes, bytes]]) -> None:
    assert await ask(path, *headers) == ["through"]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/invocations", "/tokenize", "/metrics", "/docs", "/health/", "/"]
)
@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"authorization", b"Bearer wrong"),),
        ((b"authorization", b"secret"),),
        ((b"authorization", "Bearer gehé".encode()),),
        (BEARER, BEARER),
        ((b"x-api-key", b"secret"),),
    ],
)
async def test_who_is_turned_away(path: str, headers: tuple[tuple[bytes, bytes], ...]) -> None:
    start, body = await ask(path, *headers)
    assert start["status"] == 401
    assert b"API key" in body["body"]


async def test_a_browser_may_ask_what_it_may_send() -> None:
    assert await ask("/v1/completions", method="OPTIONS") == ["through"]


async def test_a_websocket_is_closed() -> None:
    [message] = await ask("/v1/realtime", type="websocket")
    assert message["type"] == "websocket.close"
    assert await ask("/v1/realtime", BEARER, type="websocket") == ["through"]


async def test_the_apps_own_life_is_none_of_its_business() -> None:
    assert await ask("", type="lifespan") == ["through"]
