"""Values that cannot work together are refused in words, before anything is rendered."""

import pytest

from tests.helm.chart import Helm, Refused

ONE_NODE = ",".join(
    f"{component}.nodeSelector.kubernetes\\.io/hostname=node-1" for component in ("gateway", "prefill", "decode")
)
CACHED = "model.hub.id=a/b,model.cache.size=1Gi,model.cache.accessMode=ReadWriteOnce"
ROUTES = "httpRoute.enabled=true,grpcRoute.enabled=true,httpRoute.parentRefs[0].name=a,grpcRoute.parentRefs[0].name=a"
GROUPS_OF_2 = "decode.nodesPerWorker=2,decode.tensorParallelSize=2"

REFUSALS = [
    ("redis.enabled=false", "redis.urlSecret must name a Secret"),
    ("model.existingClaim=", "model.existingClaim, model.hostPath or model.hub.id must be set"),
    ("model.cache.size=1Gi", "name one with model.hub.id"),
    ("model.hub.id=a/b,model.hostPath=/srv", "model.hub.id and model.hostPath both say where the model comes from"),
    (CACHED, "accessMode is ReadWriteOnce: only pods of one node can read it"),
    (f"{CACHED},{ONE_NODE},decode.nodeSelector.kubernetes\\.io/hostname=node-2", "only pods of one node can read it"),
    ("allowPlaintext=false", "set mtls.enabled"),
    ("keys.allowAnonymous=true,keys.existingSecret=keys", "keys.allowAnonymous says that there are no keys"),
    ("tls.enabled=true,tls.issuerRef.name=letsencrypt", "tls.dnsNames must have the names"),
    ("tls.existingSecret=a,tls.issuerRef.name=b", "tls.existingSecret and tls.issuerRef both say"),
    ("serviceAccount.create=false", "serviceAccount.name must be one of your own"),
    ("certificates.renewBefore=90m,certificates.duration=1h30m", "renewBefore is 90m, not less than"),
    # GPUs
    ("prefill.gpus=1", "prefill.gpus asks for GPUs, and workers.device is cpu"),
    (
        "workers.device=cuda,decode.gpus=2,prefill.gpus=1",
        "decode.gpus is 2, and a worker uses one GPU: set decode.repl",
    ),
    ("workers.device=auto,prefill.gpus=8", "prefill.gpus is 8, and a worker uses one GPU"),
    ("workers.device=cuda,prefill.gpus=1", "nothing gives a GPU to the pods of decode"),
    ("workers.transport=grpc,workers.rdma.resource=rdma/ib", "workers.rdma.resource is for nixl"),
    # workers of several pods
    ("decode.nodesPerWorker=2", "decode.tensorParallelSize, which is 1, must be the same"),
    (f"{GROUPS_OF_2},decode.tensorParallelSize=4", "decode.tensorParallelSize, which is 4, must be the same"),
    (f"{GROUPS_OF_2},workers.device=auto,decode.gpus=1", "a worker on several nodes is for CPUs so far"),
    ("prefill.exclusiveTopology=rack", "prefill.nodesPerWorker is 1"),
    (f"{GROUPS_OF_2},decode.port=9290", "decode.port and workers.groupPort are both 9290"),
    (
        f"{GROUPS_OF_2},decode.extraArgs={{--rank=1}}",
        "has --rank, which the chart gives already: by decode.nodesPerWorker",
    ),
    (f"{GROUPS_OF_2},decode.kvMemory=32GiB", "of 2 pods together. is 32GiB, and decode.resources.limits.memory"),
    # memory and CPU
    ("redis.maxMemory=400mb", "redis.maxMemory is 400mb, and redis.resources.limits.memory,.* is 384Mi"),
    ("redis.maxMemory=403000k", "redis.maxMemory is 403000k, and redis.resources.limits.memory"),
    ("redis.maxMemory=1g,redis.resources.limits.memory=900M", "redis.maxMemory is 1g, and .* is 900M"),
    ("decode.kvMemory=16GiB", "decode.kvMemory is 16GiB, and decode.resources.limits.memory, which must have room"),
    (
        "prefill.resources.requests.memory=4Gi,prefill.resources.limits.memory=4Gi",
        "prefill.kvMemory is 4GiB, and .* is 4Gi",
    ),
    (
        "gateway.resources.requests.memory=2Gi",
        "gateway.resources.requests.memory is 2Gi, above the limit, which is 1Gi",
    ),
    ("prefill.resources.limits.cpu=500m", "prefill.resources.requests.cpu is 4, above the limit, which is 500m"),
    (
        "decode.resources.limits.memory=4e9",
        "decode.resources.requests.memory is 16Gi, above the limit, which is 4e9",
    ),
    ("redis.resources.requests.memory=0.5Gi", "redis.resources.requests.memory is 0.5Gi, above the limit"),
    # numbers of pods
    ("autoscaling.kind=keda", "autoscaling.prometheus must be the URL"),
    ("autoscaling.kind=hpa", "set monitoring.rules.enabled"),
    *(
        (
            f"autoscaling.kind=hpa,monitoring.rules.enabled=true,autoscaling.{component}.minReplicas=9",
            f"autoscaling.{component}.minReplicas is 9, above maxReplicas",
        )
        for component in ("gateway", "prefill", "decode")
    ),
    # ports
    ("gateway.port=9000", "gateway.port and gateway.grpcPort are both 9000|gateway.grpcPort and gateway.port are both"),
    ("gateway.adminPort=8000", "are both 8000"),
    ("mtls.enabled=true,workers.healthPort=9200", "decode.port and workers.healthPort are both 9200"),
    (
        "gateway.extraArgs={--port=9999}",
        "extraArgs of gateway has --port, which the chart gives already: by gateway.port",
    ),
    ("gateway.extraArgs={--grpc-port,port}", "extraArgs of gateway has --grpc-port, .* by gateway.grpcPort"),
    ("gateway.extraArgs={--max-waiting=1,--admin-port=9}", "extraArgs of gateway has --admin-port"),
    ("workers.extraArgs={--port=9999}", "extraArgs of prefill has --port, .* by prefill.port"),
    ("decode.extraArgs={--port=9999}", "extraArgs of decode has --port, .* by decode.port"),
    ("decode.extraArgs={--host=0.0.0.0}", "extraArgs of decode has --host, .* by the pod's address"),
    ("decode.extraArgs={--num-threads=2}", "extraArgs of decode has --num-threads, .* by decode.resources.limits.cpu"),
    ("mtls.enabled=true,workers.extraArgs={--health-port=1}", "has --health-port, .* by workers.healthPort"),
    # the Service, and what leads to it
    ("gateway.service.loadBalancerClass=a", "loadBalancerClass is for the type LoadBalancer, and .* is ClusterIP"),
    (
        "gateway.service.type=NodePort,gateway.service.loadBalancerSourceRanges={10.0.0.0/8}",
        "loadBalancerSourceRanges is for the type LoadBalancer, and gateway.service.type is NodePort",
    ),
    ("gateway.service.externalTrafficPolicy=Local", "is for the type LoadBalancer or NodePort, and .* is ClusterIP"),
    ("gateway.service.nodePorts.grpc=30090", "gateway.service.nodePorts are for the type LoadBalancer or NodePort"),
    (
        "gateway.service.type=NodePort,gateway.service.nodePorts.grpc=30080,gateway.service.nodePorts.http=30080",
        "gateway.service.nodePorts.http and gateway.service.nodePorts.grpc are both 30080",
    ),
    (
        "networkPolicy.monitoring=null,monitoring.monitor=pod",
        "monitor is pod, and networkPolicy.monitoring lets nobody",
    ),
    ("ingress.enabled=true", "ingress.host must be set"),
    ("httpRoute.enabled=true", "httpRoute.parentRefs must name a Gateway"),
    ("grpcRoute.enabled=true", "grpcRoute.parentRefs must name a Gateway"),
    (ROUTES, "httpRoute and grpcRoute have a hostname in common"),
    (f"{ROUTES},httpRoute.hostnames={{a.b,c.d}},grpcRoute.hostnames={{c.d}}", "have a hostname in common"),
]


@pytest.mark.few(18)
@pytest.mark.parametrize(("settings", "words"), REFUSALS)
def test_what_cannot_work_is_refused_in_words(helm: Helm, settings: str, words: str):
    with pytest.raises(Refused, match=words):
        helm.render(None, "--set", settings)


@pytest.mark.parametrize(
    "settings",
    [
        f"{CACHED},{ONE_NODE}",
        "certificates.renewBefore=89m,certificates.duration=1h30m",
        "workers.device=cuda,prefill.gpus=1,decode.gpus=1",
        "workers.device=cuda,prefill.runtimeClassName=nvidia,decode.podSpec.resourceClaims[0].name=gpu",
        "workers.device=cuda,prefill.gpus=1,decode.gpus=1,decode.kvMemory=40GiB",  # the GPU's
        "redis.maxMemory=383mb",
        "redis.enabled=false,redis.urlSecret=url,redis.maxMemory=1g",
        "prefill.resources.limits.cpu=4000m",
        "redis.resources.requests.memory=0.3Gi",
        "decode.resources.limits.memory=1Ei",
        "decode.kvMemory=15.5GiB",
        f"{GROUPS_OF_2},decode.kvMemory=31GiB",
        "autoscaling.gateway.minReplicas=9",  # nobody scales
        "mtls.enabled=false,workers.healthPort=9200",
        "networkPolicy.monitoring=null,monitoring.monitor=pod,networkPolicy.enabled=false",
        "workers.extraArgs={--max-num-seqs=64},decode.extraArgs={--max-num-seqs=128}",  # a role's come last
        "gateway.service.type=LoadBalancer,gateway.service.nodePorts.http=30080,gateway.service.externalTrafficPolicy=Local",
        f"{ROUTES},grpcRoute.parentRefs[0].sectionName=grpc",
        f"{ROUTES},httpRoute.hostnames={{a.b}},grpcRoute.hostnames={{c.d}}",
    ],
)
def test_what_works_together_is_rendered(helm: Helm, settings: str):
    """The other side of each border."""
    assert helm.render(None, "--set", settings)
