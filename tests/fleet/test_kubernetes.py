"""configs/kubernetes: valid by the schemas of Kubernetes' API, and one with another and with what numa-launcher does."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from launcher.base.cpuset import CpuSet
from launcher.config.loading import load_config
from launcher.keys.api_keys import OPEN_PATHS
from launcher.proxy.routes import Match, match

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "kubernetes"
# The oldest release with every field used, and the newest that the package has schemas of.
RELEASES = ("1.34", "1.37")
# Kinds whose schemas are not Kubernetes' own, or are not part of its API.
OTHERS = {"InferencePool", "EndpointPickerConfig", "KubeletConfiguration", "Kustomization"}
# What the host of the example has.
CPUS = 512

NAME = {"type": "string", "minLength": 1, "maxLength": 253}
PORT = {
    "type": "object", "additionalProperties": False, "required": ["number"],
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
}  # fmt: skip
# The fields of `spec` that are used, after the API's reference (inference.networking.k8s.io/v1, release v1.6.0).
POOL = {
    "type": "object", "additionalProperties": False, "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": {
            "type": "object", "additionalProperties": False, "required": ["matchLabels"],
            "properties": {"matchLabels": {"type": "object", "minProperties": 1, "additionalProperties": NAME}},
        },
        "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": PORT},
        "endpointPickerRef": {
            # A Service, which is the default kind, needs its port.
            "type": "object", "additionalProperties": False, "required": ["name", "port"],
            "properties": {"name": NAME, "port": PORT, "failureMode": {"enum": ["FailOpen", "FailClose"]}},
        },
    },
}  # fmt: skip


def documents() -> list[tuple[str, dict[str, Any]]]:
    return [
        (path.name, document)
        for path in sorted(FOLDER.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]


def of(kind: str) -> dict[str, Any]:
    (found,) = (document for _, document in documents() if document["kind"] == kind)
    return found


def pod() -> dict[str, Any]:
    found: dict[str, Any] = of("DaemonSet")["spec"]["template"]["spec"]
    return found


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(document, id=document["kind"])
        for _, document in documents()
        if document["kind"] not in OTHERS
    ],
)
def test_the_schemas_of_kubernetes_take_it(document: dict[str, Any], release: str) -> None:
    """Strict: an unknown field fails."""
    import kubernetes_validate  # noqa: PLC0415  heavy

    kubernetes_validate.validate(document, release, strict=True)


def test_a_misspelt_field_is_found() -> None:
    import kubernetes_validate  # noqa: PLC0415  heavy

    document = of("DaemonSet")
    document["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, RELEASES[0], strict=True)


def test_nothing_is_left_out() -> None:
    kinds = [document["kind"] for _, document in documents()]
    assert {"DaemonSet", "PodDisruptionBudget", "Service", "InferencePool", "ResourceClaimTemplate"} <= {
        *kinds
    }
    assert len(kinds) == len(set(kinds))
    for name in of("Kustomization")["resources"]:
        assert (FOLDER / name).exists()


def test_the_pod_is_guaranteed_and_has_whole_cpus() -> None:
    resources = container()["resources"]
    assert resources["requests"] == resources["limits"]
    assert set(resources["limits"]) == {"cpu", "memory"}
    assert resources["limits"]["cpu"].isdecimal()
    assert "initContainers" not in pod()


def test_a_service_named_vllm_sets_no_port_in_the_pod() -> None:
    assert pod()["enableServiceLinks"] is False


def test_pod_kubelet_and_claims_share_the_hosts_cpus() -> None:
    kubelet = of("KubeletConfiguration")
    reserved = CpuSet.parse(kubelet["reservedSystemCPUs"])
    cpus = int(container()["resources"]["limits"]["cpu"])
    assert cpus + len(reserved) == CPUS
    # full-pcpus-only: threads of a core are N and N + 256.
    assert {cpu % (CPUS // 2) for cpu in reserved} == {cpu for cpu in reserved if cpu < CPUS // 2}
    assert cpus % 2 == 0
    requests = of("ResourceClaimTemplate")["spec"]["spec"]["devices"]["requests"]
    assert sum(int(request["exactly"]["capacity"]["requests"]["dra.cpu/cpu"]) for request in requests) == cpus


def test_the_kubelets_memory_adds_up() -> None:
    """kubernetes.io, "Control Memory Management Policies on a Node": else the kubelet does not start."""
    kubelet = of("KubeletConfiguration")

    def gib(text: str) -> int:
        return int(text.removesuffix("Gi"))

    reserved = sum(gib(node["limits"]["memory"]) for node in kubelet["reservedMemory"])
    parts = (kubelet["kubeReserved"], kubelet["systemReserved"])
    assert reserved == sum(gib(part["memory"]) for part in parts) + gib(
        kubelet["evictionHard"]["memory.available"]
    )
    assert (kubelet["cpuManagerPolicy"], kubelet["memoryManagerPolicy"]) == ("static", "Static")
    assert kubelet["topologyManagerPolicy"] != "single-numa-node"


def test_the_configuration_is_one_of_the_daemon(tmp_path: Path) -> None:
    text = of("ConfigMap")["data"]["config.toml"]
    file = tmp_path / "config.toml"
    file.write_text(text)
    config = load_config(file, environ={})
    port = container()["ports"][0]["containerPort"]
    assert config.proxy.listen == (f"0.0.0.0:{port}",)
    assert of("Service")["spec"]["ports"][0]["targetPort"] == container()["ports"][0]["name"]
    assert of("InferencePool")["spec"]["targetPorts"] == [{"number": port}]
    # The image's ENTRYPOINT reads /etc/numa-launcher/config.toml.
    assert {"name": "config", "mountPath": "/etc/numa-launcher", "readOnly": True} in container()[
        "volumeMounts"
    ]
    model = tomllib.loads(text)["models"][0]["path"]
    assert any(model.startswith(mount["mountPath"] + "/") for mount in container()["volumeMounts"])


def test_a_pod_has_time_to_drain(tmp_path: Path) -> None:
    """preStop runs first, in the same period."""
    file = tmp_path / "config.toml"
    file.write_text(of("ConfigMap")["data"]["config.toml"])
    supervision = load_config(file, environ={}).supervision
    needed = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed += supervision.drain_timeout_s + supervision.stop_timeout_s + 15
    assert pod()["terminationGracePeriodSeconds"] >= needed


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_ask_what_is_served_without_a_key(probe: str) -> None:
    path = container()[probe]["httpGet"]["path"]
    assert path in OPEN_PATHS
    # Only these two say whether an instance is ready: a daemon without one restarts it, and must not be killed.
    assert (path == "/health") == (probe != "livenessProbe")


def test_every_volume_is_there_and_mounted() -> None:
    assert {mount["name"] for mount in container()["volumeMounts"]} == {
        volume["name"] for volume in pod()["volumes"]
    }


def test_selectors_select_the_pods() -> None:
    labels = of("DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert of("DaemonSet")["spec"]["selector"]["matchLabels"] == labels
    assert of("Service")["spec"]["selector"] == labels
    assert of("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert of("InferencePool")["spec"]["selector"]["matchLabels"] == labels


def test_a_budget_of_disruptions_that_a_daemonset_allows() -> None:
    """kubernetes.io, "Arbitrary workloads and arbitrary selectors": a number of available pods only."""
    spec = of("PodDisruptionBudget")["spec"]
    assert isinstance(spec["minAvailable"], int)
    assert "maxUnavailable" not in spec


def test_the_inference_pool() -> None:
    pool = of("InferencePool")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    jsonschema.validate(pool["spec"], POOL)


def test_the_picker_asks_a_page_for_one_series_per_host() -> None:
    """Its path cannot have a query: it would be escaped."""
    (source,) = (
        each for each in of("EndpointPickerConfig")["plugins"] if each["type"] == "metrics-data-source"
    )
    path = source["parameters"]["path"]
    assert "?" not in path
    assert path in OPEN_PATHS
    assert isinstance(match("GET", path), Match)
