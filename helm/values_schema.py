"""The schema of the chart's values, made of values.yaml and of the options of the processes.

    python -m helm.values_schema     writes helm/baton/values.schema.json, and files/flags.json beside it, for templates

values.yaml has the keys, their kinds and, in comments, what they are for. A value that becomes an option has the
option's type and limits. The tables below have what neither says.
"""

import json
import math
import re
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import yaml
from prometheus_client import CollectorRegistry

from services.config.option import OptionField, options_of
from services.gateway.metrics import GatewayMetrics
from services.process.configs import GatewayConfig, ModelChoice, WorkerConfig

CHART = Path(__file__).parent / "baton"
SCHEMA = CHART / "values.schema.json"
GIVEN_FLAGS = CHART / "files" / "flags.json"

Schema = dict[str, Any]

# By component and flag, the value that the flag gets, or the one that decides whether it is there.
FLAGS = {
    "gateway": {
        "--model": "model.path",
        "--revision": "model.hub.revision",
        "--served-model-name": "model.servedName",
        "--host": "gateway.host",
        "--port": "gateway.port",
        "--grpc-port": "gateway.grpcPort",
        "--admin-host": "gateway.host",
        "--admin-port": "gateway.adminPort",
        "--keys": "keys.existingSecret",
        "--allow-anonymous": "keys.allowAnonymous",
        "--tls-cert": "tls.existingSecret",
        "--tls-key": "tls.existingSecret",
        "--allow-plaintext": "tls.enabled",
        "--mtls": "mtls.enabled",
        "--handoff": "gateway.handoff",
        "--handoff-threshold": "gateway.handoffThreshold",
        "--request-timeout": "gateway.requestTimeoutSeconds",
        "--drain-timeout": "drainTimeoutSeconds",
        "--log-format": "logFormat",
    },
    "worker": {
        "--model": "model.path",
        "--revision": "model.hub.revision",
        "--port": "prefill.port",
        "--mtls": "mtls.enabled",
        "--health-port": "workers.healthPort",
        "--allow-plaintext": "allowPlaintext",
        "--transport": "workers.transport",
        "--device": "workers.device",
        "--dtype": "workers.dtype",
        "--tensor-parallel-size": "prefill.tensorParallelSize",
        "--rank": "prefill.nodesPerWorker",
        "--world-size": "prefill.nodesPerWorker",
        "--group": "workers.groupPort",
        "--kv-memory": "prefill.kvMemory",
        "--max-model-len": "workers.maxModelLen",
        "--drain-timeout": "drainTimeoutSeconds",
        "--log-format": "logFormat",
    },
}
# Flags that a pod decides.
OF_THE_POD = {"gateway": {}, "worker": {"--host": "the pod's address", "--num-threads": "prefill.resources.limits.cpu"}}
# Values that are the option's own, with its type and limits; what the chart narrows is in RULES too.
TAKEN = {
    "gateway": {
        "gateway.handoff",
        "gateway.handoffThreshold",
        "gateway.requestTimeoutSeconds",
        "drainTimeoutSeconds",
        "logFormat",
    },
    "worker": {"workers.transport", "workers.device", "workers.dtype", "workers.maxModelLen"},
}
OPTIONS = {
    "gateway": [*options_of(ModelChoice), *options_of(GatewayConfig)],
    "worker": [*options_of(ModelChoice), *options_of(WorkerConfig)],
}

_TEXT: Schema = {"type": "string", "minLength": 1}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_POSITIVE: Schema = {"type": "integer", "minimum": 1}
_PORT: Schema = {"type": "integer", "minimum": 1024, "maximum": 65535}  # below, a user without rights opens none
_DIRECTORY: Schema = {"type": "string", "pattern": "^/."}
_DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(h|m|s))+$"}
_QUANTITY = "^[0-9]+([.][0-9]+)?(m|k|[MGTPE]|[KMGTPE]i|[eE][0-9]+)?$"
_STORAGE: Schema = {"type": "string", "pattern": "^([0-9]+([.][0-9]+)?([KMGTP]i?)?)?$"}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def ttft_bounds() -> list[float]:
    """Returns the bounds of the histogram of times to a first token, whole ones as integers; rules count by them."""
    (histogram,) = GatewayMetrics(CollectorRegistry()).ttft.collect()
    bounds = [float(sample.labels["le"]) for sample in histogram.samples if "le" in sample.labels]
    return [int(bound) if bound.is_integer() else bound for bound in bounds if math.isfinite(bound)]


DEFINITIONS: dict[str, Schema] = {
    "strings": {"type": "object", "additionalProperties": {"type": "string"}},
    "objects": _list({"type": "object"}),
    "texts": _list(_TEXT),
    "amounts": {"type": "object", "additionalProperties": {"type": ["string", "number", "null"], "pattern": _QUANTITY}},
    "resources": _object(requests=_ref("amounts"), limits=_ref("amounts")),
    "environment": _list(
        {
            **_object(
                name={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
                value={"type": "string"},
                valueFrom={"type": "object"},
            ),
            "required": ["name"],
        }
    ),
    "containers": _list({"type": "object", "required": ["name"]}),
    "nodePort": {"type": ["integer", "null"], "minimum": 1, "maximum": 65535},
    "issuer": _object(kind=_TEXT, name=_TEXT, group=_TEXT),
    "names": _list({**_object(name=_TEXT), "required": ["name"]}),
}

# By the path of a value, or by its last part: what values.yaml does not show.
RULES: dict[str, Schema] = {
    "tensorParallelSize": _POSITIVE,
    "nodesPerWorker": _POSITIVE,
    "fullnameOverride": {"type": "string", "maxLength": 46},
    "imagePullSecrets": _ref("names"),
    "runAsUser": _POSITIVE,
    "topologySpread": _ref("objects"),
    "image.repository": _TEXT,
    "redis.image.repository": _TEXT,
    "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "model.path": _DIRECTORY,
    "model.mountPath": _DIRECTORY,
    "model.hostPath": {"type": "string", "pattern": "^(/.*)?$"},
    "model.hub.id": {"type": "string", "pattern": "^([\\w.-]+/[\\w.-]+)?$"},
    "model.cache.accessMode": {"enum": ["ReadWriteMany", "ReadWriteOnce"]},
    "model.cache.ttlSecondsAfterFinished": {"type": ["integer", "null"], "minimum": 0},
    "size": _STORAGE,
    "issuerRef": _ref("issuer"),
    "dnsNames": _ref("texts"),
    "hostnames": _ref("texts"),
    "duration": _DURATION,
    "renewBefore": _DURATION,
    "interval": _DURATION,
    **{f"networkPolicy.{key}": _ref("objects") for key in ("clients", "monitoring")},
    **{f"networkPolicy.{key}Egress": _ref("objects") for key in ("redis", "hub", "gateway", "worker")},
    "port": _PORT,
    "grpcPort": _PORT,
    "adminPort": _PORT,
    "healthPort": _PORT,
    "groupPort": _PORT,
    "gateway.host": _TEXT,
    "gateway.requestTimeoutSeconds": _POSITIVE,  # the option takes fractions
    "gateway.service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "gateway.service.loadBalancerSourceRanges": _ref("texts"),
    "gateway.service.externalTrafficPolicy": {"enum": ["", "Cluster", "Local"]},
    "gateway.service.nodePorts": _object(http=_ref("nodePort"), grpc=_ref("nodePort")),
    "gateway.service.sessionAffinity": {"enum": ["", "None", "ClientIP"]},
    "gateway.service.spec": {"type": "object"},
    "annotations": _ref("strings"),
    "labels": _ref("strings"),
    "podLabels": _ref("strings"),
    "podAnnotations": _ref("strings"),
    "nodeSelector": _ref("strings"),
    "resources": _ref("resources"),
    "extraArgs": _ref("texts"),
    "extraEnv": _ref("environment"),
    "extraVolumes": _ref("objects"),
    "extraVolumeMounts": _ref("objects"),
    "tolerations": _ref("objects"),
    "affinity": {"type": "object"},
    "initContainers": _ref("containers"),
    "sidecars": _ref("containers"),
    "envFrom": _ref("objects"),
    "probes": _object(**{probe: {"type": "object"} for probe in ("startup", "liveness", "readiness")}),
    "strategy": {"type": "object"},
    "maxUnavailable": {"type": ["integer", "string"]},
    "containerSpec": {"type": "object"},
    "podSpec": {"type": "object"},
    "workers.startupSeconds": {"type": "integer", "minimum": 5},
    "workers.gpuResource": _TEXT,
    "workers.rdma.count": _POSITIVE,
    "kvMemory": {"type": ["string", "null"], "pattern": "^(auto|[0-9]+([.][0-9]+)? ?(([KMG]i?)?B)?)$"},
    "redis.maxMemory": {"type": "string", "pattern": "^[1-9][0-9]*([kmg]b?)?$"},
    "autoscaling.kind": {"enum": ["", "hpa", "keda"]},
    "autoscaling.prometheus": {"type": "string", "pattern": "^(https?://.+)?$"},
    "minReplicas": _POSITIVE,
    "maxReplicas": _POSITIVE,
    "target": _POSITIVE,
    "monitoring.tlsConfig": {"type": "object"},
    "relabelings": _ref("objects"),
    "metricRelabelings": _ref("objects"),
    "monitoring.monitor": {"enum": ["none", "service", "pod"]},
    "monitoring.rules.errorRatio": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "monitoring.rules.ttftSeconds": {"enum": ttft_bounds()},
    "monitoring.rules.ttftObjective": {"type": "number", "minimum": 0.95, "exclusiveMaximum": 1},  # see _alerts.tpl
    "monitoring.rules.without": _ref("texts"),
    "monitoring.rules.runbooks": {"type": "string", "pattern": "^(https?://[^#]+)?$"},
    "parentRefs": _ref("objects"),
    "backendTlsPolicy.validation": {"type": "object"},
    "extraObjects": _list({"type": ["object", "string"]}),
}


def make_schema() -> Schema:
    """The whole schema."""
    text = (CHART / "values.yaml").read_text()
    properties = _properties(yaml.safe_load(text), "", _comments(text))
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **_object(**properties, **{"global": {"type": "object"}}),
        "definitions": DEFINITIONS,
    }


def given_flags() -> dict[str, dict[str, str]]:
    """Returns the path of the chart's value that each flag gets, by part; that of a role begins with `ROLE.`."""
    return {
        part: {flag: value.replace("prefill.", "ROLE.") for flag, value in {**flags, **OF_THE_POD[part]}.items()}
        for part, flags in FLAGS.items()
    }


def option_schema(field: OptionField) -> Schema:
    """Returns the schema of what an option allows. Numbers are whole in the chart."""
    kinds = [kind for kind in get_args(field.type) or [field.type] if kind is not NoneType]
    (kind,) = kinds
    if issubclass(kind, StrEnum):
        return {"enum": [str(choice) for choice in kind]}
    names = {bool: "boolean", int: "integer", float: "integer", str: "string"}
    type_: str | list[str] = names[kind] if field.default is not None else [names[kind], "null"]
    schema: Schema = {"type": type_}
    if field.option.min is not None:
        schema["minimum"] = math.ceil(field.option.min)
    if field.option.max is not None:
        schema["maximum"] = math.floor(field.option.max)
    return schema


def _properties(values: dict[str, Any], parent: str, comments: dict[str, str]) -> dict[str, Schema]:
    found = {}
    for key, value in values.items():
        path = f"{parent}{key}"
        schema = _schema(path, value, comments)
        about = comments.get(path)
        if about is not None and "$ref" in schema:  # beside a reference nothing counts
            schema = {"allOf": [schema]}
        found[key] = schema if about is None else {"description": about, **schema}
    return found


def _schema(path: str, value: Any, comments: dict[str, str]) -> Schema:
    for rule in (path, path.rpartition(".")[2]):
        if rule in RULES:
            return RULES[rule]
    for part, paths in TAKEN.items():
        if path in paths:
            return option_schema(_option(part, path))
    match value:
        case dict() if value:
            return _object(**_properties(value, f"{path}.", comments))
        case bool():
            return {"type": "boolean"}
        case int():
            return _COUNT
        case str():
            return {"type": "string"}
    raise ValueError(f"{path} needs a rule: {value!r} does not show what else it may be")


def _option(part: str, path: str) -> OptionField:
    (flag,) = (flag for flag, value in FLAGS[part].items() if value == path)
    (found,) = (field for field in OPTIONS[part] if field.flag == flag)
    return found


def _comments(text: str) -> dict[str, str]:
    """The comments that begin with `# --`, by the path of the key that follows them."""
    found: dict[str, str] = {}
    parents: list[str] = []
    comment = ""
    for line in text.splitlines():
        if about := re.match(r" *# -- (.*)", line):
            comment = about[1]
        elif comment and (more := re.match(r" *# (.*)", line)):
            comment += f" {more[1]}"
        elif key := re.match(r"( *)([A-Za-z]\w*):", line):
            del parents[len(key[1]) // 2 :]
            parents.append(key[2])
            if comment:
                found[".".join(parents)] = comment
            comment = ""
    return found


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(make_schema(), indent=1) + "\n")
    GIVEN_FLAGS.write_text(json.dumps(given_flags(), indent=1) + "\n")
