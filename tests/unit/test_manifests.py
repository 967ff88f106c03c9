"""The Kubernetes manifests and the compose file: whole, and in step with the program."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from openengine_vllm import cli
from openengine_vllm.api_keys import API_KEY_VARIABLE
from openengine_vllm.client import commands
from openengine_vllm.engine.launch import parse_engine_args
from openengine_vllm.metrics.endpoint import PATH
from openengine_vllm.settings import ServerSettings, add_server_arguments
from tests.unit.live_server import live_server

EXAMPLES = Path(__file__).parents[2] / "examples"
OLDEST_KUBERNETES = "1.30"
"""The first one whose preStop may sleep."""
NEWEST_KUBERNETES = "1.37"
STOP_SECONDS = 20
"""What the end takes at the most after the drain: last words, open streams, the engine."""
VERSION = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]["version"]

kubernetes_validate = importlib.import_module("kubernetes_validate")  # they have no types
jsonschema = importlib.import_module("jsonschema")


def manifests() -> dict[str, dict[str, Any]]:
    """By kind."""
    files = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
    documents = [doc for file in files for doc in yaml.safe_load_all(file.read_text())]
    assert documents
    return {doc["kind"]: doc for doc in documents}


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = manifests()["Deployment"]["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    [only] = pod()["containers"]
    found: dict[str, Any] = only
    return found


def composed() -> dict[str, Any]:
    text = (EXAMPLES / "compose.yaml").read_text()
    service: dict[str, Any] = yaml.safe_load(text)["services"]["openengine"]
    return service


PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
FLAGS = {"kubernetes": container()["args"], "compose": composed()["command"]}


def settings(flags: list[str]) -> ServerSettings:
    return cli._parse(cli._normalise(flags))


@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, NEWEST_KUBERNETES])
@pytest.mark.parametrize("kind", ["Deployment", "Service"])
def test_kubernetes_knows_all_of_it(kind: str, version: str) -> None:
    assert kubernetes_validate.validate(manifests()[kind], version, strict=True) == version


def test_a_wrong_manifest_is_noticed() -> None:
    deployment = manifests()["Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["grpc"] = {"port": "x"}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, NEWEST_KUBERNETES, strict=True)


def test_compose_knows_all_of_it() -> None:
    # The package is a program, and imports much; only the schema that it ships is of interest.
    path = "check_jsonschema/builtin_schemas/vendor/compose-spec.json"
    file = metadata.distribution("check-jsonschema").locate_file(path)
    schema = json.loads(Path(str(file)).read_text())
    document = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    jsonschema.validate(document, schema)
    document["services"]["openengine"]["no_such_key"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_the_program_knows_every_flag(flags: list[str]) -> None:
    # A folder that is there: nobody looks for it elsewhere.
    def resolve(parsed: argparse.Namespace) -> None:
        parsed.model = str(Path(__file__).parent)

    parse_engine_args(cli._normalise(flags), "test", add_server_arguments, resolve)


@pytest.mark.parametrize("flags", ["--metrics-prot=1", "--no-such-flag"])
def test_a_wrong_flag_is_noticed(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_engine_args(
            [*FLAGS["kubernetes"], flags], "test", add_server_arguments, lambda _: None
        )
    assert flags.partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_other_machines_reach_what_is_meant_for_them(flags: list[str]) -> None:
    given = settings(flags)
    assert not given.loopback
    assert not given.reflects
    assert given.metrics_host == "0.0.0.0"
    assert given.metrics_port


def test_the_ports_are_one_another() -> None:
    given = settings(FLAGS["kubernetes"])
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"grpc": given.port, "metrics": given.metrics_port}
    service = manifests()["Service"]["spec"]
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports
    template = manifests()["Deployment"]["spec"]["template"]["metadata"]
    assert service["selector"].items() <= template["labels"].items()
    assert template["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(given.metrics_port),
        "prometheus.io/path": PATH,
    }
    for probe in PROBES:
        assert container()[probe]["grpc"]["port"] == given.port


async def status(channel: aio.Channel, probe: str) -> int:
    service = container()[probe]["grpc"].get("service", "")
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
    found: int = answer.status
    return found


async def test_the_probes_see_the_server_as_they_should() -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    async with (
        live_server("--api-key", "secret") as live,
        aio.insecure_channel(live.address) as channel,
    ):
        assert {await status(channel, probe) for probe in PROBES} == {serving}
        await live.server._drains.begin(
            stop_accepting=True, deadline=None, abort_after_deadline=False
        )
        assert await status(channel, "readinessProbe") != serving
        assert await status(channel, "livenessProbe") == serving


def test_there_is_time_to_drain() -> None:
    given = settings(FLAGS["kubernetes"])
    sleep = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    readiness = container()["readinessProbe"]
    assert sleep >= readiness["periodSeconds"] * readiness["failureThreshold"]
    grace = pod()["terminationGracePeriodSeconds"]
    assert grace >= sleep + given.drain_timeout + STOP_SECONDS
    grace = composed()["stop_grace_period"]
    assert int(grace.removesuffix("s")) >= settings(FLAGS["compose"]).drain_timeout + STOP_SECONDS


def test_the_key_is_a_secret() -> None:
    variables = {variable["name"]: variable for variable in container()["env"]}
    assert variables[API_KEY_VARIABLE]["valueFrom"]["secretKeyRef"]["key"]
    assert "value" not in variables[API_KEY_VARIABLE]
    assert re.fullmatch(r"\$\{\w+:\?.+\}", composed()["environment"][API_KEY_VARIABLE])
    for flags in FLAGS.values():
        assert not any(flag.startswith("--api-key") for flag in flags)


def test_the_pod_may_do_little() -> None:
    assert pod()["securityContext"]["runAsNonRoot"]
    assert pod()["securityContext"]["runAsUser"]
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod()["volumes"]}
    assert {"/tmp", "/dev/shm"} < set(mounted.values())
    home = next(v["value"] for v in container()["env"] if v["name"] == "HOME")
    assert home in mounted.values()
    assert container()["resources"]["limits"]["memory"]


def test_compose_publishes_to_this_machine_alone() -> None:
    given = settings(FLAGS["compose"])
    assert composed()["ports"] == [
        f"127.0.0.1:{port}:{port}" for port in (given.port, given.metrics_port)
    ]


def test_composes_health_check_is_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    how, program, *arguments = composed()["healthcheck"]["test"]
    assert (how, program) == ("CMD", cli.PROG)
    monkeypatch.setenv(API_KEY_VARIABLE, "key")
    assert f"127.0.0.1:{settings(FLAGS['compose']).port}" in arguments
    unreachable = [a.replace(":50051", ":1") for a in arguments]
    # What a wrong command line gives is 2; nobody listens there.
    assert commands.main(unreachable) not in (0, 2)


def test_the_image_is_of_this_version() -> None:
    dockerfile = (EXAMPLES / "Dockerfile").read_text()
    assert f"openengine-vllm=={VERSION}" in dockerfile
    assert container()["image"] == composed()["image"] == f"openengine-vllm:{VERSION}"
    assert (EXAMPLES / composed()["build"] / "Dockerfile").is_file()
    readme = (EXAMPLES.parent / "README.md").read_text()
    [recipe] = re.findall(r"pip install -c /tmp/installed.txt openengine-vllm", readme)
    assert recipe.removesuffix(" openengine-vllm") in dockerfile.replace("--no-cache-dir ", "")
