"""The pods: without rights, with probes that fit, found by their selectors, and with time to end."""

from pathlib import Path

import pytest

from tests.helm.chart import (
    CPU,
    EVERYTHING,
    GPU,
    GROUPS,
    LAPTOP,
    MINIMAL,
    MTLS,
    Helm,
    Manifest,
    arguments_of,
    component_of,
    container_of,
    containers,
    environment_of,
    of_kind,
    pod_of,
    pods_found,
    servers,
    workload,
    workloads,
)
from tests.helm.test_chart import each_case

WORKERS = ("prefill", "decode")
SERVING = ("gateway", *WORKERS)
KV_9GB = "prefill.kvMemory=9GB,decode.kvMemory=9GB"
each_worker = pytest.mark.parametrize("role", WORKERS)


@each_case
def test_every_container_runs_without_rights(helm: Helm, case: Path | None):
    """As PodSecurity's "restricted" wants it; with RDMA, memory may be pinned."""
    manifests = helm.render(case)
    for pod, container in containers(manifests):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["automountServiceAccountToken"]
        rights = container["securityContext"]["capabilities"]
        added = ["IPC_LOCK"] if "rdma/ib" in container["resources"]["limits"] else []
        assert rights == {"drop": ["ALL"], **({"add": added} if added else {})}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": rights,
        }
        assert container["resources"]["requests"]
        assert container["resources"]["limits"]["memory"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        kinds = {kind for volume in pod.get("volumes", []) for kind in volume if kind != "name"}
        allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
        assert kinds <= allowed | (
            {"hostPath"} if case in (MINIMAL, GROUPS) else set()
        )  # which the value's comment says
    for account in of_kind(manifests, "ServiceAccount").values():
        assert not account["automountServiceAccountToken"]
    accounts = set(of_kind(manifests, "ServiceAccount"))
    assert {pod["serviceAccountName"] for pod, _ in containers(manifests)} == accounts


@each_case
def test_probes_and_services_name_ports_that_containers_open(helm: Helm, case: Path | None):
    manifests = helm.render(case)
    for server in servers(manifests):
        container = container_of(manifests, component_of(server))
        opened = {port["name"] for port in container["ports"]} | {port["containerPort"] for port in container["ports"]}
        probes = [value for key, value in container.items() if key.endswith("Probe")]
        assert {"livenessProbe", "readinessProbe"} <= container.keys()
        for action in (probe.get("httpGet") or probe.get("grpc") for probe in probes):
            assert action is None or action["port"] in opened  # None: a command
    for service in of_kind(manifests, "Service").values():
        (component,) = pods_found(manifests, service["spec"]["selector"])
        opened = {port["name"] for port in container_of(manifests, component)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= opened


@each_case
def test_containers_mount_volumes_that_their_pods_have(helm: Helm, case: Path | None):
    manifests = helm.render(case)
    for each in workloads(manifests):
        claimed = [claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])]
        volumes = [volume["name"] for volume in pod_of(each).get("volumes", [])] + claimed
        assert len(set(volumes)) == len(volumes)
        for container in pod_of(each)["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} == set(volumes)


@each_case
def test_selectors_find_one_component_each(helm: Helm, case: Path | None):
    manifests = helm.render(case)
    for server in servers(manifests):
        if server["kind"] != "LeaderWorkerSet":  # it finds its pods by labels of its own
            assert pods_found(manifests, server["spec"]["selector"]["matchLabels"]) == [component_of(server)]
        for spread in pod_of(server)["topologySpreadConstraints"]:
            assert pods_found(manifests, spread["labelSelector"]["matchLabels"]) == [component_of(server)]
    budgets = [each["spec"]["selector"]["matchLabels"] for each in of_kind(manifests, "PodDisruptionBudget").values()]
    expected = [] if case == LAPTOP else [[component] for component in SERVING]
    assert [pods_found(manifests, budget) for budget in budgets] == expected


@each_case
def test_autoscalers_find_what_they_scale_which_then_names_no_number(helm: Helm, case: Path | None):
    manifests = helm.render(case)
    scalers = [*of_kind(manifests, "HorizontalPodAutoscaler").values(), *of_kind(manifests, "ScaledObject").values()]
    targets = [scaler["spec"]["scaleTargetRef"] for scaler in scalers]
    free = [
        {"apiVersion": each["apiVersion"], "kind": each["kind"], "name": each["metadata"]["name"]}
        for each in servers(manifests)
        if "replicas" not in each["spec"]
    ]
    assert sorted(targets, key=str) == sorted(free, key=str)
    assert (len(scalers) == 3) == (case in (CPU, GROUPS, EVERYTHING))


def test_an_update_never_takes_the_last_pod(helm: Helm):
    for component in SERVING:
        assert workload(helm.render(), component)["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


@pytest.mark.parametrize("drain_s", [0, 30, 120])
def test_one_value_says_how_long_a_pod_has_to_end(helm: Helm, drain_s: int):
    manifests = helm.render(None, "--set", f"drainTimeoutSeconds={drain_s}")
    gateway = container_of(manifests, "gateway")
    sleep, delay_s = gateway["lifecycle"]["preStop"]["exec"]["command"]
    assert (sleep, int(delay_s)) == ("sleep", max(1, drain_s // 6))
    assert pod_of(workload(manifests, "gateway"))["terminationGracePeriodSeconds"] > int(delay_s) + drain_s
    for role in WORKERS:
        assert pod_of(workload(manifests, role))["terminationGracePeriodSeconds"] > drain_s
    for component in SERVING:
        assert f"--drain-timeout={drain_s}" in arguments_of(manifests, component)


@each_worker
def test_a_worker_gets_the_time_to_load_its_model(helm: Helm, role: str):
    worker = workload(helm.render(EVERYTHING), role)["spec"]
    startup = worker["template"]["spec"]["containers"][0]["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] == 1200
    assert worker["progressDeadlineSeconds"] > 1200


@each_worker
def test_with_mtls_kubelet_asks_at_a_port_without_tls(helm: Helm, role: str):
    worker = container_of(helm.render(MTLS), role)
    assert "--health-port=9190" in worker["args"]
    assert {worker[f"{probe}Probe"]["grpc"]["port"] for probe in ("startup", "readiness", "liveness")} == {9190}
    assert not [argument for argument in worker["args"] if "plaintext" in argument]


def test_a_gateway_is_asked_at_its_admin_port(helm: Helm):
    gateway = container_of(helm.render(), "gateway")
    probes = {probe: gateway[f"{probe}Probe"]["httpGet"] for probe in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {"admin"}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health",
        "liveness": "/health",
        "readiness": "/ready",
    }


@each_worker
@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ("workers.device=cpu", ["--kv-memory=4GiB"]),
        ("workers.device=auto", ["--kv-memory=4GiB"]),
        ("workers.device=auto,prefill.gpus=1,decode.gpus=1", []),
        ("workers.device=cuda,prefill.gpus=1,decode.gpus=1", []),
        (f"workers.device=cuda,prefill.gpus=1,decode.gpus=1,{KV_9GB}", ["--kv-memory=9GB"]),
        ("prefill.kvMemory=null,decode.kvMemory=null", []),
    ],
)
def test_a_worker_takes_what_the_gpu_has_and_on_a_cpu_what_its_memory_limit_counts_on(
    helm: Helm, role: str, settings: str, given: list[str]
):
    arguments = arguments_of(helm.render(None, "--set", settings), role)
    assert [each for each in arguments if each.startswith("--kv-memory")] == given


@each_worker
def test_a_worker_on_a_gpu_may_choose_its_kv_memory(helm: Helm, role: str):
    worker = container_of(helm.render(GPU), role)
    assert not [argument for argument in worker["args"] if "kv-memory" in argument]
    assert {"--device=cuda", "--kv-cache-dtype=fp8"} <= set(worker["args"])
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert worker["resources"]["limits"]["rdma/ib"] == 1
    assert worker["resources"]["limits"]["memory"] == "32Gi"


def test_without_gpus_and_rdma_nobody_asks_for_them(helm: Helm):
    asked = {name for _, container in containers(helm.render()) for name in container["resources"]["limits"]}
    assert asked == {"cpu", "memory"}


def test_choices_reach_what_is_rendered(helm: Helm):
    manifests = helm.render(EVERYTHING)
    assert {"--handoff=auto", "--log-format=text"} <= set(arguments_of(manifests, "gateway"))
    for role in WORKERS:
        assert {"--transport=nixl", "--dtype=bfloat16", "--log-format=text"} <= set(arguments_of(manifests, role))
        assert container_of(manifests, role)["imagePullPolicy"] == "Always"


def test_further_variables_come_after_those_of_the_chart(helm: Helm):
    manifests = helm.render(EVERYTHING)
    names = [each["name"] for each in environment_of(container_of(manifests, "gateway"))]
    assert names[-4:] == ["BATON_REDIS_URL", "BATON_API_KEY", "OTEL_EXPORTER_OTLP_ENDPOINT", "NODE_NAME"]
    for role in WORKERS:
        assert environment_of(container_of(manifests, role))[-1] == {"name": "UCX_TLS", "value": "rc,tcp"}


def model_of(manifests: list[Manifest], component: str) -> tuple[str, Manifest]:
    """The argument, and the volume."""
    (argument,) = (each for each in arguments_of(manifests, component) if each.startswith("--model="))
    (volume,) = (each for each in pod_of(workload(manifests, component))["volumes"] if each["name"] == "model")
    return argument, volume


@pytest.mark.parametrize("component", SERVING)
def test_a_model_comes_from_a_claim_from_the_hub_or_from_a_volume_that_a_job_fills(helm: Helm, component: str):
    claim = {"claimName": "models", "readOnly": True}
    assert model_of(helm.render(), component) == (
        "--model=/models/model",
        {"name": "model", "persistentVolumeClaim": claim},
    )
    fetched = helm.render(GPU)
    assert model_of(fetched, component) == (
        "--model=meta-llama/Llama-3.1-8B-Instruct",
        {"name": "model", "emptyDir": {}},
    )
    token = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert {"name": "HF_TOKEN", "valueFrom": token} in environment_of(container_of(fetched, component))
    cached = helm.render(CPU)
    claim = {"claimName": "demo-baton-model", "readOnly": True}
    assert model_of(cached, component) == (
        "--model=/models/Qwen/Qwen3-0.6B/main",
        {"name": "model", "persistentVolumeClaim": claim},
    )
    assert not [each for each in environment_of(container_of(cached, component)) if each["name"].startswith("HF_")]
    assert "demo-baton-model" in of_kind(cached, "PersistentVolumeClaim")


def test_the_laptop_case_fits_two_cores_and_four_gib_beside_kubernetes_itself(helm: Helm):
    """Of which the pods of kind's control plane ask for 950m, and take a GiB. The helm test's pod counts too."""
    manifests = helm.render(LAPTOP)
    cpu, memory = 0.0, 0
    for each in workloads(manifests):
        assert each["spec"].get("replicas", 1) == 1
        for container in pod_of(each)["containers"]:
            resources = container["resources"]
            assert resources["limits"]["memory"].endswith("Mi")
            memory += int(resources["limits"]["memory"].removesuffix("Mi"))
            cpu += float(resources["requests"]["cpu"].removesuffix("m")) / 1000
    assert cpu <= 2 - 0.95
    assert memory <= (4 - 1) * 1024
    for component in SERVING:  # no second pod beside one that is replaced
        assert workload(manifests, component)["spec"]["strategy"] == {"type": "Recreate"}
    assert not of_kind(manifests, "PodDisruptionBudget")
