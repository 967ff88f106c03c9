"""TLS on a running server: who gets a connection, and certificates that change meanwhile."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc import StatusCode

from openengine_vllm.client import Client, OpenEngineError
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.settings import TlsFiles
from openengine_vllm.tls import TlsError, server_credentials
from tests.support.certificates import Authority, self_signed
from tests.unit.live_server import LiveServer, live_server
from tests.unit.scripted_engine import request

KEY = "the-secret-key"
BOUND = 60
"""Seconds that anything may take."""
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(frozen=True)
class Site:
    """A server's authority, that of its clients, the server's files, and a stranger."""

    servers: Authority
    clients: Authority
    strangers: Authority
    key: Path
    certificate: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """TLS without client certificates."""
        return ("--tls-cert", str(self.certificate), "--tls-key", str(self.key))

    @property
    def mutual_flags(self) -> tuple[str, ...]:
        """TLS with client certificates."""
        return (*self.flags, "--tls-client-ca", str(self.clients.certificate))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    servers = Authority(tmp_path / "servers")
    clients, strangers = Authority(tmp_path / "clients"), Authority(tmp_path / "strangers")
    return Site(servers, clients, strangers, *servers.issue("server"))


def client(
    server: LiveServer,
    trusted: Authority | None = None,
    pair: tuple[Path, Path] | None = None,
    api_key: str | None = None,
) -> Client:
    """A client with a connection of its own; plaintext when it trusts nobody."""
    credentials = None
    if trusted is not None:
        key, certificate = (None, None) if pair is None else (file.read_bytes() for file in pair)
        roots = trusted.certificate.read_bytes()
        credentials = grpc.ssl_channel_credentials(roots, key, certificate)
    target = f"127.0.0.1:{server.port}"
    return Client(
        target, credentials=credentials, api_key=api_key, timeout=BOUND, options=OWN_CONNECTION
    )


async def assert_ready(connected: Client) -> None:
    async with connected:
        assert (await connected.health()).state == pb.HEALTH_STATE_READY


async def refusal(connected: Client) -> OpenEngineError:
    async with connected:
        with pytest.raises(OpenEngineError) as caught:
            await connected.complete(request("unwanted"))
        with pytest.raises(OpenEngineError):
            await connected.health(include_inference_probe=True)
    return caught.value


async def test_a_client_that_trusts_the_server(site: Site) -> None:
    async with live_server(*site.flags) as server:
        await assert_ready(client(server, site.servers))
        assert (await refusal(client(server))).status is StatusCode.UNAVAILABLE
        wrong = await refusal(client(server, site.strangers))
        assert wrong.status is StatusCode.UNAVAILABLE
        assert server.untouched


async def test_a_client_of_the_right_authority(site: Site) -> None:
    async with live_server(*site.mutual_flags) as server:
        await assert_ready(client(server, site.servers, site.clients.issue("router")))


@pytest.mark.parametrize("who", ["none", "stranger", "server", "expired", "self-signed", "plain"])
async def test_no_other_client_gets_in(site: Site, tmp_path: Path, who: str) -> None:
    pairs = {
        "stranger": lambda: site.strangers.issue("router"),
        "server": lambda: (site.key, site.certificate),
        "expired": lambda: site.clients.issue("old", days=-1),
        "self-signed": lambda: self_signed(tmp_path),
    }
    pair = pairs[who]() if who in pairs else None
    async with live_server(*site.mutual_flags, "--api-key", KEY) as server:
        trusted = None if who == "plain" else site.servers
        error = await refusal(client(server, trusted, pair, api_key=KEY))
        assert error.status is StatusCode.UNAVAILABLE
        assert server.untouched


async def test_a_certificate_does_not_replace_the_key(site: Site) -> None:
    pair = site.clients.issue("router")
    async with live_server(*site.mutual_flags, "--api-key", KEY) as server:
        error = await refusal(client(server, site.servers, pair))
        assert error.status is StatusCode.UNAUTHENTICATED
        assert server.untouched
        await assert_ready(client(server, site.servers, pair, api_key=KEY))


async def test_a_new_certificate_needs_no_restart_and_harms_no_stream(site: Site) -> None:
    successor = Authority(site.key.parent.parent / "successor")
    async with live_server(*site.flags) as server, client(server, site.servers) as old:
        running = asyncio.ensure_future(old.complete(request("r")))
        [collector] = await server.engine.accepted("r")
        collector.put("a")

        replace(site, successor.issue("server"))
        await assert_ready(client(server, successor))
        await refusal(client(server, site.servers))

        collector.put("b", "length")
        assert (await running).outputs[0].text == "ab"


async def test_a_broken_certificate_leaves_the_last_good_one(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    good_key = site.key.read_bytes()
    async with live_server(*site.flags) as server:
        for broken in (b"", b"-----BEGIN PRIVATE KEY-----\n", None):
            if broken is None:
                site.key.unlink()
            else:
                site.key.write_bytes(broken)
            for _ in range(2):
                await assert_ready(client(server, site.servers))
        assert "".join(capsys.readouterr()).count("keeping the last good certificate") == 3

        site.key.write_bytes(good_key)
        await assert_ready(client(server, site.servers))
        successor = Authority(site.key.parent.parent / "successor")
        replace(site, successor.issue("server"))
        await assert_ready(client(server, successor))


async def test_the_clients_authority_may_change_too(site: Site) -> None:
    before, after = site.clients.issue("router"), site.strangers.issue("router")
    async with live_server(*site.mutual_flags) as server:
        await assert_ready(client(server, site.servers, before))
        shutil.copy(site.strangers.certificate, site.clients.certificate)
        await assert_ready(client(server, site.servers, after))
        await refusal(client(server, site.servers, before))


def test_what_cannot_be_served_is_said_at_the_start(site: Site, tmp_path: Path) -> None:
    other_key, _ = site.servers.issue("other")
    secret = tmp_path / "secret.key"
    command = ["openssl", "pkcs8", "-topk8", "-in", str(site.key), "-out", str(secret)]
    subprocess.run([*command, "-passout", "pass:word"], check=True, capture_output=True)
    empty = tmp_path / "empty.pem"
    empty.touch()
    binary = tmp_path / "binary.pem"
    binary.write_bytes(b"\xff\xfe")
    absent, cert, key = tmp_path / "absent", site.certificate, site.key

    assert complaint(absent, key) == f"--tls-cert {absent}: No such file or directory"
    assert complaint(cert, tmp_path) == f"--tls-key {tmp_path}: Is a directory"
    assert complaint(cert, key, absent).startswith(f"--tls-client-ca {absent}: No such")
    for wrong in (complaint(empty, key), complaint(cert, other_key), complaint(cert, secret)):
        assert "need a certificate and its private key, PEM without a passphrase" in wrong
        assert "\n" not in wrong
    for ca in (empty, binary, key, site.certificate):
        says = complaint(cert, key, ca)
        assert says.startswith(f"--tls-client-ca {ca}: needs authorities' certificates, PEM")


def complaint(certificate: Path, key: Path, client_ca: Path | None = None) -> str:
    with pytest.raises(TlsError) as caught:
        server_credentials(TlsFiles(certificate, key, client_ca))
    return str(caught.value)


def replace(site: Site, pair: tuple[Path, Path]) -> None:
    """Puts other files in the place of the server's, as a renewal does."""
    for new, old in zip(pair, (site.key, site.certificate), strict=True):
        shutil.copy(new, old)
