"""The same door for HTTP as for gRPC: whoever has no key is turned away before anything is read."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

from openengine_vllm.api_keys import ApiKeys

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN: Final = frozenset({"/health", "/ping"})
"""What supervisors' probes ask; they have no key."""
_BODY: Final = json.dumps(
    {"error": {"message": "a valid API key is required", "type": "Unauthorized", "code": 401}}
).encode()


class KeyCheck:
    """An ASGI app in front of another.

    Args:
        app: what callers with a key reach.
        keys: any of them opens every path.
    """

    def __init__(self, app: App, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection's request."""
        if self._lets_in(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})

    def _lets_in(self, scope: Scope) -> bool:
        if scope["type"] not in ("http", "websocket"):
            return True
        # A browser asks with OPTIONS, and without its key, what it may send.
        if scope["path"] in _OPEN or scope.get("method") == "OPTIONS":
            return True
        return self._keys.admit(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        )
