"""What the metrics tell of live workers and of failed handoffs."""

from prometheus_client import CollectorRegistry

from kvtransfer.messages import EndReason
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


def test_failed_handoffs_are_told_apart_by_their_reasons() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    for reason in EndReason:
        metrics.handoff_failed(reason, ("p:1", "d:1"))
    metrics.handoff_failed(EndReason.READ_FAILED, ("p:1", "d:1"))
    lines = metrics.render().decode().splitlines()
    assert 'baton_handoff_failures_total{reason="stale"} 1.0' in lines
    assert 'baton_handoff_failures_total{reason="read_failed"} 2.0' in lines
    assert sum(line.startswith("baton_handoff_failures_total{") for line in lines) == len(EndReason)
