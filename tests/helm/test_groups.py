"""Workers of several pods: LeaderWorkerSets, whose pods differ in their place in the group alone."""

import kubernetes_validate
import pytest

from tests.helm.chart import GROUPS, Helm, Manifest, arguments_of, of_kind, templates_of, workload
from tests.helm.test_chart import NEWEST
from tests.helm.test_network_policies import REDIS, SERVING, Policies

NODES = {"prefill": 2, "decode": 4}
each_role = pytest.mark.parametrize("role", NODES)


def group_of(manifests: list[Manifest], role: str) -> Manifest:
    found = workload(manifests, role)
    assert found["kind"] == "LeaderWorkerSet"
    return found


@each_role
def test_a_group_has_a_pod_for_each_rank_and_starts_as_one(helm: Helm, role: str):
    group = group_of(helm.render(GROUPS), role)["spec"]["leaderWorkerTemplate"]
    assert group["size"] == NODES[role]
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"


@each_role
def test_pods_of_a_group_differ_in_their_place_alone(helm: Helm, role: str):
    first, other = templates_of(group_of(helm.render(GROUPS), role))
    places = []
    for template in (first, other):
        (container,) = template["spec"]["containers"]
        of_place = ("--rank=", "--group=")
        places.append([each for each in container["args"] if each.startswith(of_place)])
        container["args"] = [each for each in container["args"] if not each.startswith(of_place)]
        assert f"--world-size={NODES[role]}" in container["args"]
        assert f"--tensor-parallel-size={NODES[role]}" in container["args"]
        assert f"--kv-memory={4 * NODES[role]}GiB" in container["args"], "of all pods together"
        assert {"name": "group", "containerPort": 9300} in container["ports"]
    assert first == other
    assert places == [
        ["--rank=0", "--group=$(POD_IP):9300"],
        ["--rank=$(LWS_WORKER_INDEX)", "--group=$(LWS_LEADER_ADDRESS):9300"],
    ]


@each_role
def test_kubernetes_takes_the_pods_of_a_group(helm: Helm, role: str):
    for template in templates_of(group_of(helm.render(GROUPS), role)):
        labels = template["metadata"]["labels"]
        spec = {"selector": {"matchLabels": labels}, "template": template}
        deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": role}, "spec": spec}
        kubernetes_validate.validate(deployment, f"1.{NEWEST}", strict=True)


def test_updates_and_racks_are_as_values_say(helm: Helm):
    manifests = helm.render(GROUPS)
    prefill, decode = (group_of(manifests, role) for role in NODES)
    topology = "leaderworkerset.sigs.k8s.io/exclusive-topology"
    assert prefill["metadata"]["annotations"] == {topology: "topology.kubernetes.io/rack"}
    assert "annotations" not in decode["metadata"]
    by_rack, by_hand = (each["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] for each in (prefill, decode))
    assert by_rack == {"maxUnavailable": 0, "maxSurge": 1}
    assert by_hand == {"maxUnavailable": 1, "maxSurge": 0}


def test_pods_of_a_role_reach_each_other_at_any_port(helm: Helm):
    """Those that add up connect at ports of the kernel's choice."""
    flows = Policies(helm.render(GROUPS)).flows()
    within = {(role, role, port) for role in NODES for port in ("grpc", "group", "chosen by the kernel")}
    assert flows == SERVING | REDIS | within


def test_one_role_may_have_groups_and_the_other_none(helm: Helm):
    manifests = helm.render(None, "--set", "decode.nodesPerWorker=2,decode.tensorParallelSize=2")
    assert set(of_kind(manifests, "LeaderWorkerSet")) == {"demo-baton-decode"}
    assert workload(manifests, "prefill")["kind"] == "Deployment"
    assert not [each for each in arguments_of(manifests, "prefill") if each.startswith("--group")]
