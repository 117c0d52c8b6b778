"""Docker, Compose and Kubernetes files agree with the service: flags, ports, paths, timeouts and metrics."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from bertsmith.cli import app
from bertsmith.serving.http.app import make_app
from bertsmith.serving.http.metrics import Metrics
from bertsmith.serving.requests import SchedulerStats
from bertsmith.serving.settings import ServeSettings

ROOT = Path(__file__).parents[3]
MANIFESTS = ROOT / "deploy" / "kubernetes"
STARTED = ["--host", "0.0.0.0", "--port", "8080"]


def _read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _flags(arguments: list[str]) -> dict[str, Any]:
    """Parse the arguments of `bertsmith serve`; raise for unknown ones."""
    _, bound, _ = app.parse_args(["serve", *arguments], exit_on_error=False, print_error=False)
    return bound.arguments


class _Idle:
    def stats(self) -> SchedulerStats:
        return SchedulerStats(0, 0, 0, 0.0, 0.0, None, None, None, 0, 0, 0)


@pytest.fixture(scope="module")
def container() -> dict[str, Any]:
    (container,) = _read(MANIFESTS / "deployment.yaml")["spec"]["template"]["spec"]["containers"]
    return container


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with their arguments."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def test_image_starts_the_service_as_an_unprivileged_user(instructions: list[tuple[str, str]]) -> None:
    last = dict(instructions)  # for repeated instructions, the last stage counts
    assert json.loads(last["ENTRYPOINT"]) == ["bertsmith", "serve", *STARTED]
    assert _flags([*json.loads(last["ENTRYPOINT"])[2:], *json.loads(last["CMD"])])["folders"] == ["/models/model"]
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", last["USER"])
    assert last["EXPOSE"] == "8080"
    assert last["STOPSIGNAL"] == "SIGTERM"
    words = [word for word, _ in instructions]
    after_user = words[words.index("USER") :]
    assert not {"RUN", "COPY", "ADD"} & set(after_user)
    probe = last["HEALTHCHECK"]
    command = json.loads(probe[probe.index("[") :])
    compile(command[-1], "healthcheck", "exec")
    assert "http://127.0.0.1:8080/health" in command[-1]


def test_image_copies_existing_files(instructions: list[tuple[str, str]]) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [
        name for word, rest in instructions if word == "COPY" and "--from" not in rest for name in rest.split()[:-1]
    ]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert name in allowed, name
    assert all((ROOT / name).exists() for name in allowed)


def test_compose_has_a_cpu_and_a_cuda_service(instructions: list[tuple[str, str]]) -> None:
    services = _read(ROOT / "compose.yaml")["services"]
    assert set(services) == {"bertsmith", "cuda"}
    known = {rest.partition("=")[0] for word, rest in instructions if word == "ARG"}
    assert set(services["cuda"]["build"]["args"]) <= known
    for service in services.values():
        assert _flags([*STARTED, *service["command"]])
        assert service["ports"] == ["127.0.0.1:8080:8080"]
        assert service["read_only"]
        assert "BERTSMITH_KEY" in service["environment"]
        assert int(service["stop_grace_period"].rstrip("s")) > ServeSettings().times.drain


def test_kustomization_lists_every_manifest() -> None:
    listed = _read(MANIFESTS / "kustomization.yaml")["resources"]
    assert sorted(listed) == sorted(path.name for path in MANIFESTS.glob("*.yaml") if path.stem != "kustomization")
    for name in listed:
        manifest = _read(MANIFESTS / name)
        assert manifest["metadata"]["name"] == "bertsmith"
        assert {"apiVersion", "kind", "spec"} <= set(manifest)


def test_pod_uses_the_flags_ports_and_paths_of_the_service(container: dict[str, Any]) -> None:
    flags = _flags([*STARTED, *container["args"]])
    assert flags["workers"] == int(container["resources"]["requests"]["cpu"])
    (port,) = container["ports"]
    assert port["containerPort"] == flags["port"] == 8080
    paths = make_app({}, ServeSettings()).openapi()["paths"]
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in paths
        assert container[probe]["httpGet"]["port"] == port["name"]
    assert container["livenessProbe"]["tcpSocket"]["port"] == port["name"]
    (env,) = [one for one in container["env"] if "valueFrom" in one]
    monitored = _read(MANIFESTS / "podmonitor.yaml")["spec"]["podMetricsEndpoints"][0]
    assert env["name"] == "BERTSMITH_KEY"
    assert env["valueFrom"]["secretKeyRef"] == monitored["authorization"]["credentials"]
    assert monitored["path"] in paths
    assert monitored["port"] == port["name"]
    mounted, volumes = (
        container["volumeMounts"],
        _read(MANIFESTS / "deployment.yaml")["spec"]["template"]["spec"]["volumes"],
    )
    assert [one["name"] for one in mounted] == [one["name"] for one in volumes]
    assert flags["folders"][0].startswith(f"{mounted[0]['mountPath']}/")


def test_grace_period_covers_the_shutdown(container: dict[str, Any]) -> None:
    pod = _read(MANIFESTS / "deployment.yaml")["spec"]["template"]["spec"]
    flags = _flags([*STARTED, *container["args"]])
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = pod["terminationGracePeriodSeconds"]
    assert grace > before + flags["drain"] + flags.get("drain_delay", 0)
    assert flags["drain"] > flags["timeout"]
    ready = container["readinessProbe"]
    live = container["livenessProbe"]
    assert live["periodSeconds"] * live["failureThreshold"] > grace
    assert ready["periodSeconds"] * ready["failureThreshold"] <= 10
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_selectors_match_the_pod_labels(container: dict[str, Any]) -> None:
    deployment = _read(MANIFESTS / "deployment.yaml")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert _read(MANIFESTS / "service.yaml")["spec"]["selector"] == labels
    for name in ("disruption", "podmonitor"):
        assert _read(MANIFESTS / f"{name}.yaml")["spec"]["selector"]["matchLabels"] == labels


def test_autoscaler_reads_an_existing_metric() -> None:
    scaler = _read(MANIFESTS / "autoscaler.yaml")["spec"]
    name = scaler["metrics"][0]["pods"]["metric"]["name"]
    (rule,) = _read(ROOT / "deploy" / "prometheus-adapter.yaml")["rules"]["custom"]
    assert rule["name"]["as"] == name
    assert rule["seriesQuery"].startswith(name)
    metrics = Metrics({"model": _Idle()})  # type: ignore[dict-item]
    assert f'\n{name}{{model="model"}}' in metrics.text().decode()
    assert scaler["scaleTargetRef"]["name"] == _read(MANIFESTS / "deployment.yaml")["metadata"]["name"]
