"""What the metrics tell of live workers."""

from prometheus_client import CollectorRegistry

from services.config import WorkerRole
from services.gateway.metrics import GatewayMetrics
from tests.gateway.scripted_worker import worker_hello

SAMPLE = 'baton_worker_info{kernels="avx2",role="decode",worker="host:1"} 1.0'


def test_a_worker_has_a_sample_with_what_computes_its_steps_until_it_is_gone() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    metrics.worker_up("host:1", worker_hello(WorkerRole.DECODE, 1, kernels="avx2"))
    assert SAMPLE in metrics.render().decode().splitlines()
    metrics.worker_gone("host:1", WorkerRole.DECODE)
    assert "baton_worker_info{" not in metrics.render().decode()
