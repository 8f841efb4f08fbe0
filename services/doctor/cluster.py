"""A cluster, before the chart is installed: what this user may do there, and what of the chart it can run.

Needs the `kubernetes` client (`pip install 'baton-serve[kubernetes]'`). It finds the cluster as kubectl does: by
KUBECONFIG or `~/.kube/config`, and in a pod by its service account.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from services.doctor.finding import CannotCheck, Finding, error, note, ok, warning

LIMIT_S = 30.0
LOWEST_VERSION = (1, 30)
VERBS = ("get", "create", "patch", "delete")
FURTHER_VERBS: Mapping[str, tuple[str, ...]] = {  # helm keeps its releases in Secrets, and `--wait` watches the rest
    "secrets": ("list", "update"),
    "pods": ("list", "watch"),
    "jobs": ("list", "watch"),
    "deployments": ("list", "watch"),
    "statefulsets": ("list", "watch"),
}
# Resources of the chart by their API group; "" is the core. Those of a group that the cluster has not are optional.
RESOURCES: Mapping[str, tuple[str, ...]] = {
    "": ("configmaps", "persistentvolumeclaims", "pods", "secrets", "serviceaccounts", "services"),
    "apps": ("deployments", "statefulsets"),
    "autoscaling": ("horizontalpodautoscalers",),
    "batch": ("jobs",),
    "networking.k8s.io": ("ingresses", "networkpolicies"),
    "policy": ("poddisruptionbudgets",),
    "cert-manager.io": ("certificates", "issuers"),
    "gateway.networking.k8s.io": ("backendtlspolicies", "grpcroutes", "httproutes"),
    "keda.sh": ("scaledobjects",),
    "leaderworkerset.x-k8s.io": ("leaderworkersets",),
    "monitoring.coreos.com": ("podmonitors", "prometheusrules", "servicemonitors"),
}
OPTIONAL: Mapping[str, str] = {
    "cert-manager.io": "certificates that cert-manager makes (mtls, tls)",
    "gateway.networking.k8s.io": "httpRoute and grpcRoute",
    "keda.sh": "autoscaling.kind keda",
    "leaderworkerset.x-k8s.io": "workers of several pods (nodesPerWorker)",
    "monitoring.coreos.com": "monitoring",
}
_GPU = "nvidia.com/gpu"
_RDMA = "rdma/"
_REQUEST_S = 5.0
_AT_ONCE = 8  # questions
_IN_POD = "KUBERNETES_SERVICE_HOST"  # a variable that every pod has
_NOT_FOUND = 404
_ENFORCED = "pod-security.kubernetes.io/enforce"


def check_cluster(namespace: str, kubeconfig: str | None = None) -> list[Finding]:
    """Asks the API server of the current context. Raises CannotCheck where the client is missing.

    kubeconfig: None: the file that kubectl would use.
    """
    try:
        import yaml
        from kubernetes import client, config
        from urllib3.exceptions import HTTPError
    except ImportError as reason:
        raise CannotCheck("the client is not installed: pip install 'baton-serve[kubernetes]'") from reason
    # The client says little of a file that is none: it fails where it looks for the first thing that is missing.
    not_a_file = (config.ConfigException, yaml.YAMLError, TypeError, ValueError, KeyError, AttributeError, OSError)
    try:
        if _IN_POD in os.environ and "KUBECONFIG" not in os.environ:
            config.load_incluster_config()  # type: ignore[no-untyped-call]
        else:
            config.load_kube_config(kubeconfig)  # type: ignore[no-untyped-call]
    except not_a_file as reason:
        words = " ".join(f"no configuration of a cluster: {reason}".split())
        return [error("reached", words, "set KUBECONFIG to a file that kubectl can use")]
    configuration = client.Configuration.get_default_copy()
    configuration.retries = False
    with client.ApiClient(configuration) as api:
        try:
            return _look(client, api, namespace)
        except client.ApiException as reason:
            words = f"{reason.status} {reason.reason}"
        except (HTTPError, OSError, ValueError) as reason:  # ValueError: an answer that is no API server's
            words = " ".join(str(reason).split())
    return [error("reached", f"{configuration.host}: {words}", "look at the context, the network and your login")]


def _look(client: Any, api: Any, namespace: str) -> list[Finding]:
    version = client.VersionApi(api).get_code(_request_timeout=_REQUEST_S)
    groups = {group.name for group in client.ApisApi(api).get_api_versions(_request_timeout=_REQUEST_S).groups}
    needed = [
        (verb, group, resource)
        for group, resources in RESOURCES.items()
        if group not in OPTIONAL or group in groups
        for resource in resources
        for verb in (*VERBS, *FURTHER_VERBS.get(resource, ()))
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        allowed = list(pool.map(lambda each: _may(client, api, namespace, *each), needed))
    refused = [each for each, may in zip(needed, allowed, strict=True) if not may]
    return [
        check_version(version.git_version),
        check_access(namespace, refused),
        check_groups(groups),
        _namespace(client, api, namespace),
        _nodes(client, api),
    ]


def _may(client: Any, api: Any, namespace: str, verb: str, group: str, resource: str) -> bool:
    attributes = client.V1ResourceAttributes(namespace=namespace, verb=verb, group=group, resource=resource)
    review = client.V1SelfSubjectAccessReview(spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes))
    answer = client.AuthorizationV1Api(api).create_self_subject_access_review(review, _request_timeout=_REQUEST_S)
    return bool(answer.status.allowed)


def check_version(version: str) -> Finding:
    """Judges the server's version, as v1.31.2."""
    parts = tuple(int(part) for part in version.removeprefix("v").split(".")[:2] if part.isdigit())
    if parts < LOWEST_VERSION:
        lowest = ".".join(map(str, LOWEST_VERSION))
        return warning("version", version, f"the chart is tested against the schemas of {lowest} and later")
    return ok("version", version)


def check_access(namespace: str, refused: Sequence[tuple[str, str, str]]) -> Finding:
    """Tells whether this user may install the chart. refused: verbs, API groups and resources."""
    if not refused:
        return ok("access", f"this user may install, upgrade and remove the chart in {namespace}")
    lacking: dict[str, list[str]] = {}
    for verb, group, resource in refused:
        lacking.setdefault(f"{resource}.{group}" if group else resource, []).append(verb)
    words = "; ".join(f"{resource}: {', '.join(verbs)}" for resource, verbs in lacking.items())
    advice = "a Role that allows them, or leave out the values that need them"
    return error("access", f"not allowed in {namespace}: {words}", advice)


def check_groups(groups: Collection[str]) -> Finding:
    """Tells which parts of the chart need something that the cluster has not."""
    missing = [f"{group} ({values})" for group, values in OPTIONAL.items() if group not in groups]
    if missing:
        return note(
            "custom resources", f"not installed: {', '.join(missing)}", "leave these values off, or install them"
        )
    return ok("custom resources", "all that values of the chart may ask for")


def _namespace(client: Any, api: Any, namespace: str) -> Finding:
    try:
        labels = client.CoreV1Api(api).read_namespace(namespace, _request_timeout=_REQUEST_S).metadata.labels or {}
    except client.ApiException as reason:
        if reason.status == _NOT_FOUND:
            return note("namespace", f"{namespace} is not there", "helm install --create-namespace")
        return note("namespace", f"not read: {reason.reason}")
    return check_namespace(namespace, labels)


def check_namespace(namespace: str, labels: Mapping[str, str]) -> Finding:
    """Tells what the namespace's level of PodSecurity means for the chart."""
    level = labels.get(_ENFORCED, "privileged")
    if level == "privileged":
        return ok("namespace", f"{namespace} takes every pod of the chart")
    return note(
        "namespace", f"{namespace} enforces PodSecurity {level}: no model.hostPath and no workers.rdma.resource"
    )


def _nodes(client: Any, api: Any) -> Finding:
    try:
        nodes = client.CoreV1Api(api).list_node(_request_timeout=_REQUEST_S).items
    except client.ApiException as reason:
        return note("nodes", f"not listed: {reason.reason}; GPUs and ports for RDMA are not known")
    return check_nodes([node.status.allocatable or {} for node in nodes])


def check_nodes(allocatable: Sequence[Mapping[str, str]]) -> Finding:
    """Counts what workers may ask nodes for. allocatable: quantities of each node, by resource."""
    gpus = sum(int(node.get(_GPU, "0")) for node in allocatable)
    rdma = sorted({name for node in allocatable for name in node if name.startswith(_RDMA)})
    found = f"{len(allocatable)} nodes, {gpus} of {_GPU}, for RDMA: {', '.join(rdma) or 'nothing'}"
    return ok("nodes", found) if gpus else note("nodes", found, "without GPUs: ci/cpu-values.yaml")
