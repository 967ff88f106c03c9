"""Keys: where they come from, and what a call has to bring."""

from __future__ import annotations

from pathlib import Path

import pytest

from openengine_vllm.api_keys import API_KEY_VARIABLE, ApiKeys, configured_keys

KEYS = ApiKeys(["first-key", "second-key"])


@pytest.mark.parametrize(
    "header", ["Bearer first-key", "Bearer second-key", "bearer first-key", "BEARER first-key"]
)
def test_one_of_the_keys_is_enough(header: str) -> None:
    assert KEYS.admit((("user-agent", "x"), ("authorization", header), ("a-bin", b"\xff")))


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", ""),),
        (("authorization", "Bearer"),),
        (("authorization", "Bearer "),),
        (("authorization", "first-key"),),
        (("authorization", "Basic first-key"),),
        (("authorization", "Bearer  first-key"),),
        (("authorization", "Bearer first-key "),),
        (("authorization", "Bearer\tfirst-key"),),
        (("authorization", "Bearer first-ke"),),
        (("authorization", "Bearer irst-key"),),
        (("authorization", "Bearer first-key2"),),
        (("authorization", "Bearer FIRST-KEY"),),
        (("authorization", "Bearer first-key,second-key"),),
        (("authorization", "Bearer first-key\u00fc"),),
        (("authorization", "Bearer \ud800"),),
        (("authorization", b"Bearer first-key"),),
        (("x-api-key", "first-key"), ("authorization-bin", b"Bearer first-key")),
        (("authorization", "Bearer first-key"), ("authorization", "Bearer first-key")),
        (("authorization", "Bearer no"), ("authorization", "Bearer first-key")),
    ],
)
def test_nothing_else_is(metadata: tuple[tuple[str, str | bytes], ...]) -> None:
    assert not KEYS.admit(metadata)


def test_no_keys_let_nobody_in() -> None:
    assert not ApiKeys()
    assert not ApiKeys().admit((("authorization", "Bearer "),))


@pytest.mark.parametrize("key", ["", " ", "a b", "a\nb", "\u00fc", "a\x7f", "\ud800"])
def test_a_key_that_no_header_can_hold(key: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII") as caught:
        ApiKeys(["fine", key])
    assert not key.strip() or key not in str(caught.value)


def test_no_key_is_shown() -> None:
    assert repr(KEYS) == "<ApiKeys: 2>"


def test_equal_keys() -> None:
    assert ApiKeys(["a", "a"]) == ApiKeys(["a"]) != ApiKeys(["b"])


def test_the_flags_go_together_and_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n  one \r\n\ntwo\n")
    environment = {API_KEY_VARIABLE: "three"}

    assert configured_keys(None, None, {}) == ApiKeys()
    assert configured_keys(None, None, environment) == ApiKeys(["three"])
    assert configured_keys(None, file, environment) == ApiKeys(["one", "two"])
    assert configured_keys(["zero"], file, environment) == ApiKeys(["zero", "one", "two"])
    assert configured_keys(["zero", "more"], None, environment) == ApiKeys(["zero", "more"])


@pytest.mark.parametrize("content", [b"", b"\n \n", b"good\nbad key\n", b"\xff\xfe", b"a\x00"])
def test_a_file_without_a_usable_key(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)

    with pytest.raises(ValueError, match=f"^--api-key-file {file}: ") as caught:
        configured_keys(None, file, {})
    assert "bad key" not in str(caught.value)


def test_a_secret_that_went_missing_does_not_open_the_server(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{API_KEY_VARIABLE}: "):
        configured_keys(None, None, {API_KEY_VARIABLE: ""})
    with pytest.raises(ValueError, match=r"^--api-key: "):
        configured_keys(["fine", ""], None, {})
    with pytest.raises(ValueError, match="Is a directory"):
        configured_keys(None, tmp_path, {})
