"""What operators lay over the chart's manifests wins, and leaves alone what it does not name."""

import hashlib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.helm.chart import CPU, MTLS, Helm, Manifest, container_of, of_kind, pod_of, workload
from tests.helm.test_chart import NEWEST

# Where the values of each are.
COMPONENTS = {each: each for each in ("gateway", "prefill", "decode", "redis", "test")} | {"model": "model.cache"}
each_component = pytest.mark.parametrize("component", COMPONENTS)


def render(helm: Helm, directory: Path, values: dict[str, Any], case: Path | None = None) -> list[Manifest]:
    text = yaml.safe_dump(values)
    file = directory / f"{hashlib.sha256(text.encode()).hexdigest()}.yaml"  # what is rendered is kept by its name
    file.write_text(text)
    return helm.render(case, "--values", str(file))


def at(path: str, value: Any) -> dict[str, Any]:
    """The value as it stands in a file of values."""
    key, _, rest = path.partition(".")
    return {key: at(rest, value) if rest else value}


def own_container(manifests: list[Manifest], component: str) -> Manifest:
    first: Manifest = pod_of(workload(manifests, component))["containers"][0]
    return first


def by_name(items: list[Manifest]) -> dict[str, Manifest]:
    return {item["name"]: item for item in items}


@each_component
def test_every_field_that_the_chart_sets_can_be_replaced_and_removed(helm: Helm, tmp_path: Path, component: str):
    """Of pod and container. CPU has all components."""
    before = helm.render(CPU)
    pod, container = pod_of(workload(before, component)), own_container(before, component)
    marks = {field: f"mine-{field}" for field in pod if field != "containers"}
    own = {field: f"mine-{field}" for field in container if field != "name"}
    values = at(COMPONENTS[component], {"podSpec": marks, "containerSpec": own})
    after = render(helm, tmp_path, values, CPU)
    assert {key: value for key, value in pod_of(workload(after, component)).items() if key != "containers"} == marks
    assert own_container(after, component) == {"name": container["name"], **own}
    gone = at(COMPONENTS[component], {"podSpec": dict.fromkeys(marks), "containerSpec": dict.fromkeys(own)})
    after = render(helm, tmp_path, gone, CPU)
    assert pod_of(workload(after, component)) == {"containers": [{"name": container["name"]}]}


def test_false_and_0_and_what_is_empty_win_too(helm: Helm, tmp_path: Path):
    emptied = {"runAsNonRoot": False, "runAsUser": 0, "fsGroupChangePolicy": "", "runAsGroup": None}
    values = {"gateway": {"podSpec": {"securityContext": emptied, "topologySpreadConstraints": []}}}
    pod = pod_of(workload(render(helm, tmp_path, values), "gateway"))
    assert pod["topologySpreadConstraints"] == []
    assert pod["securityContext"] == {
        "runAsNonRoot": False,
        "runAsUser": 0,
        "fsGroup": 10001,
        "fsGroupChangePolicy": "",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_nothing_else_changes(helm: Helm, tmp_path: Path):
    """An overlay of one component stays in its pods."""
    values = {"decode": {"podSpec": {"hostIPC": True}, "containerSpec": {"tty": True}}}
    fixed = {"redis": {"passwordSecret": "a"}, "keys": {"apiKeySecret": "b"}}
    before, after = render(helm, tmp_path, fixed), render(helm, tmp_path, fixed | values)
    changed = workload(before, "decode")
    pod_of(changed)["hostIPC"] = True
    pod_of(changed)["containers"][0]["tty"] = True
    assert before == after


def test_items_with_names_stay_beside_those_that_are_laid_over(helm: Helm, tmp_path: Path):
    before = helm.render(MTLS)
    pod, container = pod_of(workload(before, "gateway")), container_of(before, "gateway")
    cache = {"name": "kernels", "persistentVolumeClaim": {"claimName": "kernels"}}
    more = {"name": "more", "emptyDir": {}}
    url = {"name": "BATON_REDIS_URL", "value": "redis://elsewhere"}
    mount = {"name": "more", "mountPath": "/tmp", "subPath": "tmp"}
    values = {
        "gateway": {
            "podSpec": {"volumes": [cache, more]},
            "containerSpec": {"env": [url], "volumeMounts": [mount], "ports": [{"name": "http", "hostPort": 80}]},
        }
    }
    after = render(helm, tmp_path, values, MTLS)
    changed = container_of(after, "gateway")
    assert by_name(pod_of(workload(after, "gateway"))["volumes"]) == by_name([*pod["volumes"], cache, more])
    assert by_name(changed["env"]) == by_name([*container["env"], url])  # its Secret is gone from it
    assert list(by_name(changed["env"])) == list(by_name(container["env"]))  # $(...) refers to those before it
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert {each["mountPath"]: each for each in changed["volumeMounts"]} == mounts | {"/tmp": mount}
    ports = [port | ({"hostPort": 80} if port["name"] == "http" else {}) for port in container["ports"]]
    assert changed["ports"] == ports


def test_a_list_without_names_is_replaced(helm: Helm, tmp_path: Path):
    after = render(helm, tmp_path, {"decode": {"containerSpec": {"args": ["decode", "--help"]}}})
    assert container_of(after, "decode")["args"] == ["decode", "--help"]


def test_a_probe_or_hook_has_one_action(helm: Helm, tmp_path: Path):
    """Kubernetes refuses two."""
    values = {
        "gateway": {
            "containerSpec": {
                "livenessProbe": {"tcpSocket": {"port": "http"}},
                "lifecycle": {"preStop": {"sleep": {"seconds": 9}}},
            },
            "probes": {"readiness": {"httpGet": {"path": "/ping"}, "periodSeconds": 60}},
        }
    }
    before, after = container_of(helm.render(), "gateway"), container_of(render(helm, tmp_path, values), "gateway")
    assert after["livenessProbe"] == {"tcpSocket": {"port": "http"}, "periodSeconds": 10, "timeoutSeconds": 5}
    assert after["lifecycle"] == {"preStop": {"sleep": {"seconds": 9}}}
    expected = before["readinessProbe"] | {"periodSeconds": 60}
    assert after["readinessProbe"] == expected | {"httpGet": before["readinessProbe"]["httpGet"] | {"path": "/ping"}}
    assert after["startupProbe"] == before["startupProbe"]


HATCHES = {
    "podLabels": {"team": "chat", "app.kubernetes.io/component": "mine"},
    "priorityClassName": "serving",
    "runtimeClassName": "nvidia",
    "initContainers": [{"name": "warm", "image": "warm:1"}],
    "sidecars": [{"name": "proxy", "image": "proxy:1", "ports": [{"containerPort": 15001}]}],
    "envFrom": [{"configMapRef": {"name": "variables"}}],
    "probes": {"liveness": {"periodSeconds": 77}},
    "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
}


def test_each_component_has_the_fields_that_are_asked_for_most(helm: Helm, tmp_path: Path):
    """And Kubernetes takes them; the model's init container is still there."""
    components = ("gateway", "prefill", "decode", "redis")
    values: dict[str, Any] = dict.fromkeys(components, HATCHES)
    values["prefill"] = HATCHES | {"podSpec": {"containers": [{"name": "proxy", "image": "proxy:2"}]}}
    manifests = render(helm, tmp_path, values, CPU)
    for component in components:
        found = workload(manifests, component)
        pod, labels = pod_of(found), found["spec"]["template"]["metadata"]["labels"]
        assert (labels["team"], labels["app.kubernetes.io/component"]) == ("chat", component)  # by which it is found
        assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("serving", "nvidia")
        assert [each["name"] for each in pod["containers"]] == [component, "proxy"]
        assert pod["containers"][1]["image"] == ("proxy:2" if component == "prefill" else "proxy:1")
        waits = [] if component == "redis" else ["model"]
        assert [each["name"] for each in pod["initContainers"]] == [*waits, "warm"]
        assert pod["containers"][0]["envFrom"] == HATCHES["envFrom"]
        assert pod["containers"][0]["livenessProbe"]["periodSeconds"] == 77
        assert found["spec"]["updateStrategy" if component == "redis" else "strategy"] == HATCHES["strategy"]
        every = {"apiVersion": "apps/v1", "kind": f"{found['kind']}List", "metadata": {}, "items": [found]}
        kubernetes_validate.validate(every, f"1.{NEWEST}", strict=True)


def test_disruption_budgets_are_there_or_not_by_component(helm: Helm):
    settings = "prefill.podDisruptionBudget.enabled=false,gateway.podDisruptionBudget.maxUnavailable=0"
    budgets = of_kind(helm.render(None, "--set", settings), "PodDisruptionBudget")
    assert {name: each["spec"]["maxUnavailable"] for name, each in budgets.items()} == {
        "demo-baton-gateway": 0,
        "demo-baton-decode": 1,
    }


def test_any_field_of_the_service_can_be_said_its_ports_by_their_names(helm: Helm, tmp_path: Path):
    before = of_kind(helm.render(), "Service")["demo-baton"]["spec"]
    grpc = {"name": "grpc", "appProtocol": "grpc"}
    spec = {"ipFamilyPolicy": "PreferDualStack", "ports": [grpc], "type": "ExternalName"}
    after = of_kind(render(helm, tmp_path, {"gateway": {"service": {"spec": spec}}}), "Service")["demo-baton"]["spec"]
    ports = [port | (grpc if port["name"] == "grpc" else {}) for port in before["ports"]]
    assert after == before | spec | {"ports": ports}


@pytest.mark.parametrize(
    ("settings", "protocols"),
    [
        ("allowPlaintext=true", {"http": "http", "grpc": "kubernetes.io/h2c", "admin": "http", "redis": "redis"}),
        (
            "tls.enabled=true,mtls.enabled=true",
            {"https": "https", "grpc": "https", "admin": "https", "redis": "tls"},
        ),
    ],
)
def test_ports_of_services_say_what_they_speak(helm: Helm, settings: str, protocols: dict[str, str]):
    services = of_kind(helm.render(None, "--set", settings), "Service").values()
    assert {port["name"]: port["appProtocol"] for each in services for port in each["spec"]["ports"]} == protocols


def test_pods_may_have_a_service_account_of_ones_own(helm: Helm):
    role = "serviceAccount.annotations.eks\\.amazonaws\\.com/role-arn=arn:aws:iam::1:role/chat"
    manifests = helm.render(None, "--set", f"serviceAccount.name=chat,{role}")
    (account,) = of_kind(manifests, "ServiceAccount").values()
    assert account["metadata"]["name"] == "chat"
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/chat"}
    manifests = helm.render(None, "--set", "serviceAccount.name=mine,serviceAccount.create=false")
    assert not of_kind(manifests, "ServiceAccount")
    for component in ("gateway", "prefill", "decode", "redis", "test"):
        assert pod_of(workload(manifests, component))["serviceAccountName"] == "mine"


def test_further_manifests_are_templates_as_maps_and_as_text(helm: Helm, tmp_path: Path):
    as_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-map"}}
    as_text = 'apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ include "baton.fullname" . }}-text\n'
    manifests = render(helm, tmp_path, {"extraObjects": [as_map, as_text]})
    assert set(of_kind(manifests, "ConfigMap")) == {"demo-map", "demo-baton-text"}


def test_whatever_changes_the_job_makes_another_one(helm: Helm, tmp_path: Path):
    """Kubernetes refuses to change a Job's pods; an image's new tag would end an upgrade."""
    changes: list[dict[str, Any]] = [
        {},
        {"image": {"tag": "2"}},
        {"model": {"cache": {"podSpec": {"hostNetwork": True}}}},
        {"model": {"cache": {"resources": {"limits": {"memory": "4Gi"}}}}},
        {"model": {"cache": {"ttlSecondsAfterFinished": 60}}},
    ]
    jobs = [of_kind(render(helm, tmp_path, values, CPU), "Job") for values in changes]
    assert len({name for job in jobs for name in job}) == len(changes)
    assert [job["spec"].get("ttlSecondsAfterFinished") for each in jobs for job in each.values()] == [*[None] * 4, 60]
