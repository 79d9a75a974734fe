"""Dockerfile, compose files, Kubernetes manifests, systemd unit: they agree with the code and each other."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from foreword.cli.configuration import unknown_variables
from foreword.config.options import Config
from foreword.server.app import ROUTE_TABLE
from tests.support.waiting import WAIT_S

ROOT = Path(__file__).parent.parent
PACKAGING = ROOT / "packaging"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMPOSE = yaml.safe_load((PACKAGING / "compose.yaml").read_text(encoding="utf-8"))
COMPOSE_CUDA = yaml.safe_load((PACKAGING / "compose.cuda.yaml").read_text(encoding="utf-8"))
KUBERNETES = sorted((PACKAGING / "kubernetes").glob("*.yaml"))
OBJECTS = {
    (each["kind"], each["metadata"]["name"]): each
    for path in KUBERNETES
    for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    if "kind" in each
}
STATEFUL_SET = OBJECTS["StatefulSet", "foreword"]
POD = STATEFUL_SET["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
DEFAULT = Config()


def stages() -> dict[str, list[str]]:
    """Instructions of each stage of the Dockerfile, after those of the stage that it begins from."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", "")
    found: dict[str, list[str]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            name = match[2]
            found[name] = list(found.get(match[1], [line]))
        else:
            found[name].append(line)
    return found


STAGES = stages()


def instruction(stage: str, name: str) -> str:
    """The last such instruction of a stage, which is the one that counts."""
    return [line.removeprefix(f"{name} ") for line in STAGES[stage] if line.startswith(f"{name} ")][-1]


def environment(stage: str) -> dict[str, str]:
    words = [word for line in STAGES[stage] if line.startswith("ENV ") for word in shlex.split(line)[1:]]
    return dict(word.split("=", 1) for word in words)


# Docker


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_images_serve_on_their_port_as_a_user_and_are_asked_for_their_health(target: str) -> None:
    options = environment(target)
    assert unknown_variables(options) == []
    assert (options["FOREWORD_HOST"], options["FOREWORD_PORT"]) == ("0.0.0.0", instruction(target, "EXPOSE"))
    assert instruction(target, "USER") == "1000:1000"  # in numbers: Kubernetes' runAsNonRoot knows no names
    assert any("useradd --create-home --uid 1000 foreword" in line for line in STAGES[target])
    assert f"COPY --from=install-{target} /opt/foreword /opt/foreword" in STAGES[target]
    command = json.loads(instruction(target, "HEALTHCHECK").partition("CMD ")[2])
    assert command[:2] == ["python", "-m"] and find_spec(command[2]) is not None
    entry = json.loads(instruction(target, "ENTRYPOINT"))
    assert entry[0] in PROJECT["scripts"] and json.loads(instruction(target, "CMD")) == ["serve"]


def test_default_image_is_that_of_cpus() -> None:
    assert list(STAGES)[-1] == "cpu"


def test_cuda_image_has_what_triton_needs() -> None:
    assert any("gcc libc6-dev" in line and "Python.h" in line for line in STAGES["cuda"])
    assert environment("cuda")["TRITON_CACHE_DIR"].startswith("/home/foreword/.cache/")


def test_images_are_built_from_files_that_exist_and_docker_may_read() -> None:
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line[:1] == "!"
    }
    copied = [
        word
        for lines in STAGES.values()
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    assert {*copied} == allowed
    assert all((ROOT / name).exists() for name in allowed)


def test_requirements_of_the_image_are_those_of_the_package(tmp_path: Path) -> None:
    """The Dockerfile's own program reads them, with the extras of the build argument."""
    code = re.search(r"python -c '(import sys, tomllib.*?)'", instruction("requirements", "RUN"), re.DOTALL)
    assert code is not None
    for extras, names in (("", []), ("otel", ["otel"]), ("otel,gguf", ["otel", "gguf"])):
        words = [sys.executable, "-c", code[1], extras]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        wanted = [line for name in names for line in PROJECT["optional-dependencies"][name]]
        assert done.stdout.splitlines() == [*PROJECT["dependencies"], *wanted]
    assert instruction("requirements", "ARG") == "EXTRAS=otel"


def test_pods_need_their_secret() -> None:
    """A typo in its name would open the server."""
    (key,) = [each["valueFrom"] for each in CONTAINER["env"] if each["name"] == "FOREWORD_API_KEY"]
    assert not key["secretKeyRef"].get("optional")


def test_versions_are_those_of_the_package() -> None:
    version = PROJECT["version"]
    assert f"image.version={version} " in DOCKERFILE
    assert STATEFUL_SET["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/version"] == version
    for target, image in (
        ("cpu", COMPOSE["services"]["foreword"]["image"]),
        ("cuda", COMPOSE_CUDA["services"]["foreword"]["image"]),
        ("cpu", CONTAINER["image"]),
        (
            "cuda",
            yaml.safe_load((PACKAGING / "kubernetes/cuda.yaml").read_text())["spec"]["template"]["spec"][
                "containers"
            ][0]["image"],
        ),
    ):
        assert image == f"foreword:{version}-{target}"
    page = (ROOT / "docs/deploying.md").read_text(encoding="utf-8")
    assert COMPOSE["services"]["jaeger"]["image"] in page
    assert set(re.findall(r"foreword:(\d[\w.]*)-", page)) == {version}


@pytest.mark.parametrize("program", ["hadolint"])
def test_dockerfile_has_no_findings(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run([program, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout == "" and done.returncode == 0


# Compose


def test_compose_mounts_files_that_exist_where_they_are_looked_for() -> None:
    mounted = {}
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source, target, *_ = re.sub(r"^\$\{\w+:-(\w+)\}", r"\1", volume).split(":")
            if source.startswith("."):
                assert (PACKAGING / source).is_file(), source
                mounted[target] = yaml.safe_load((PACKAGING / source).read_text(encoding="utf-8"))
            else:
                assert source in COMPOSE["volumes"]
    prometheus = mounted["/etc/prometheus/prometheus.yml"]
    assert all(f"/etc/prometheus/{name}" in mounted for name in prometheus["rule_files"])
    (provider,) = mounted["/etc/grafana/provisioning/dashboards/foreword.yml"]["providers"]
    dashboard = COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert dashboard in mounted and str(Path(dashboard).parent) == provider["options"]["path"]


def test_volumes_of_compose_belong_to_the_user_of_the_image() -> None:
    (made,) = re.findall(r"install -d -o foreword -g foreword (.+)", DOCKERFILE)
    writable = [volume for volume in COMPOSE["services"]["foreword"]["volumes"] if not volume.endswith(":ro")]
    assert made.split() == [volume.rsplit(":", 1)[1] for volume in writable]


def test_compose_services_reach_each_other() -> None:
    (scrape,) = yaml.safe_load((ROOT / "monitoring/prometheus.yml").read_text())["scrape_configs"]
    port = instruction("cpu", "EXPOSE")
    assert scrape["static_configs"] == [{"targets": [f"foreword:{port}"]}]
    assert scrape["job_name"].startswith("foreword")  # as the alerts and the dashboard want it
    (source,) = yaml.safe_load((ROOT / "monitoring/grafana/datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"
    assert {"foreword", "prometheus", "grafana"} <= set(COMPOSE["services"])
    assert COMPOSE["services"]["foreword"]["ports"][0].endswith(f":{port}")


def test_compose_pins_versions_and_keeps_to_the_loopback() -> None:
    text = (PACKAGING / "compose.yaml").read_text(encoding="utf-8")
    for name, service in COMPOSE["services"].items():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(-cpu)?", service["image"]), service["image"]
        for port in service["ports"]:
            assert port.startswith(("127.0.0.1:", "${ADDRESS:-127.0.0.1}:")), name
    assert not re.search(r"(?i)(password|key|token)\s*[:=]", text)
    server, drain_s = COMPOSE["services"]["foreword"], DEFAULT.drain_delay + DEFAULT.drain_timeout
    assert server["build"]["target"] in STAGES
    assert COMPOSE_CUDA["services"]["foreword"]["build"]["target"] in STAGES
    assert int(server["stop_grace_period"].removesuffix("s")) >= drain_s + 5


# Kubernetes


def test_probes_ask_the_routes_that_mean_it() -> None:
    """docs/serving.md: /live restarts, /ready sends requests, /health says whether a step can run."""
    paths = {
        name: CONTAINER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")
    }
    assert paths == {"startup": "/health", "liveness": "/live", "readiness": "/ready"}
    assert all(ROUTE_TABLE.template(path) == path for path in paths.values())
    assert CONTAINER["ports"] == [{"name": "http", "containerPort": int(instruction("cpu", "EXPOSE"))}]
    assert {CONTAINER[f"{name}Probe"]["httpGet"]["port"] for name in paths} == {"http"}
    startup = CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 3600  # as the image's start period
    assert "--start-period=60m" in instruction("cpu", "HEALTHCHECK")


def test_a_pod_has_time_to_drain() -> None:
    options = {each["name"]: each.get("value") for each in CONTAINER["env"]}
    assert unknown_variables({name: value or "x" for name, value in options.items()}) == []
    delay, drain = float(options["FOREWORD_DRAIN_DELAY"]), float(options["FOREWORD_DRAIN_TIMEOUT"])
    assert POD["terminationGracePeriodSeconds"] >= delay + drain + 10
    readiness = CONTAINER["readinessProbe"]
    assert delay > readiness["periodSeconds"] * readiness["failureThreshold"]


def test_a_pod_has_no_more_rights_than_it_needs() -> None:
    user, group = map(int, instruction("cpu", "USER").split(":"))
    context = POD["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (user, group, group)
    assert context["runAsNonRoot"] and context["seccompProfile"] == {"type": "RuntimeDefault"}
    inner = CONTAINER["securityContext"]
    assert inner["readOnlyRootFilesystem"] and not inner["allowPrivilegeEscalation"]
    assert inner["capabilities"] == {"drop": ["ALL"]}
    assert POD["enableServiceLinks"] is False and POD["automountServiceAccountToken"] is False
    written = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert written == {"/tmp", "/home/foreword/.cache"}
    assert any("/home/foreword/.cache" in line for line in STAGES["cpu"] if line.startswith("RUN "))


def test_selectors_find_the_pods_once() -> None:
    labels = STATEFUL_SET["spec"]["template"]["metadata"]["labels"]
    services = [each for (kind, _), each in OBJECTS.items() if kind == "Service"]
    for service in services:
        assert service["spec"]["selector"].items() <= labels.items()
        assert service["spec"]["ports"][0]["targetPort"] == "http"
    assert STATEFUL_SET["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert ("Service", STATEFUL_SET["spec"]["serviceName"]) in OBJECTS
    wanted = OBJECTS["ServiceMonitor", "foreword"]["spec"]["selector"]["matchLabels"]
    scraped = [each for each in services if wanted.items() <= each["metadata"]["labels"].items()]
    assert len(scraped) == 1  # or each pod would be scraped twice


def merge(base: Any, patch: Any) -> Any:
    """A strategic merge, as of `kubectl patch`: mappings by key, containers by name."""
    if isinstance(base, dict):
        return base | {key: merge(base.get(key), value) for key, value in patch.items()}
    if isinstance(base, list) and all(isinstance(each, dict) and "name" in each for each in base):
        named = {each["name"]: each for each in base}
        return list((named | {each["name"]: merge(named.get(each["name"]), each) for each in patch}).values())
    return patch


def test_patch_for_gpus_changes_the_image_and_asks_for_a_gpu() -> None:
    patch = yaml.safe_load((PACKAGING / "kubernetes/cuda.yaml").read_text(encoding="utf-8"))
    (container,) = merge(STATEFUL_SET, patch)["spec"]["template"]["spec"]["containers"]
    assert container["image"].endswith("-cuda") and container["args"] == CONTAINER["args"]
    assert container["resources"]["limits"] == CONTAINER["resources"]["limits"] | {"nvidia.com/gpu": "1"}


def test_manifests_follow_the_schemas_of_kubernetes() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    patch = yaml.safe_load((PACKAGING / "kubernetes/cuda.yaml").read_text(encoding="utf-8"))
    builtin = [each for (kind, _), each in OBJECTS.items() if kind != "ServiceMonitor"]
    assert len(builtin) == 3
    for each in (*builtin, merge(STATEFUL_SET, patch)):
        for version in ("1.28", validator.latest_version()):
            validator.validate(each, version, strict=True)


# systemd


def test_unit_gives_time_to_drain_and_does_not_restart_a_wrong_configuration() -> None:
    lines = (PACKAGING / "foreword.service").read_text(encoding="utf-8").splitlines()
    unit = dict(line.split("=", 1) for line in lines if "=" in line and line[:1] not in "#")
    assert int(unit["TimeoutStopSec"]) >= DEFAULT.drain_delay + DEFAULT.drain_timeout + 5
    assert unit["RestartPreventExitStatus"] == "2"
    assert unit["ExecStart"].endswith("/foreword serve")
