"""The keys that let a caller in. Only their digests are kept: no log or error can show a key."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

API_KEY_VARIABLE: Final = "OPENENGINE_API_KEY"
"""The environment variable that holds a key, for the server and for the commands."""
VLLM_API_KEY_VARIABLE: Final = "VLLM_API_KEY"
"""The same of vLLM's own HTTP server."""

_KEY = re.compile(r"[!-~]+")
_SCHEME: Final = "bearer"


class ApiKeys:
    """A set of keys, any of which is enough; an empty set is false and lets nobody in.

    Raises:
        ValueError: a key is empty, or not printable ASCII without spaces.
    """

    __slots__ = ("_digests",)

    def __init__(self, keys: Iterable[str] = ()) -> None:
        digests = []
        for key in keys:
            if not _KEY.fullmatch(key):
                raise ValueError("an API key has to be printable ASCII without spaces, not empty")
            digests.append(_digest(key))
        self._digests = tuple(dict.fromkeys(digests))

    def __len__(self) -> int:
        return len(self._digests)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ApiKeys) and self._digests == other._digests

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<ApiKeys: {len(self)}>"

    def admit(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether a call's metadata has one ``authorization: Bearer KEY`` with one of the keys.

        Every key is compared, and whole, so that the time tells nothing of them.
        """
        credentials: str | bytes | None = None
        for name, value in metadata:
            if name == "authorization":
                if credentials is not None:
                    return False
                credentials = value
        if not isinstance(credentials, str):
            return False
        scheme, _, key = credentials.partition(" ")
        if scheme.lower() != _SCHEME:
            return False
        presented, known = _digest(key), False
        for digest in self._digests:
            known |= hmac.compare_digest(presented, digest)
        return known


def configured_keys(
    keys: Sequence[str] | None, file: Path | None, environment: Mapping[str, str]
) -> ApiKeys:
    """The keys of the flags together; those of the environment where there are no flags.

    An empty key is an error rather than none: a secret that went missing must not open the
    server.

    Raises:
        ValueError: names the flag or variable that is wrong, never its value.
    """
    if keys is None and file is None:
        if API_KEY_VARIABLE not in environment:
            return ApiKeys()
        return _named(API_KEY_VARIABLE, (environment[API_KEY_VARIABLE],))
    given = list(keys or ())
    _named("--api-key", given)
    return ApiKeys(given if file is None else given + _read(file))


def _read(file: Path) -> list[str]:
    name = f"--api-key-file {file}"
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ValueError(f"{name}: holds no key")
    _named(name, keys)
    return keys


def _named(name: str, keys: Iterable[str]) -> ApiKeys:
    try:
        return ApiKeys(keys)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "replace")).digest()
