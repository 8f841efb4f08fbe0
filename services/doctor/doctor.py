"""The checks that a configuration asks for, and their order."""

import asyncio
import logging
import os
from collections.abc import Iterator

import structlog

from kvtransfer.transports.one_sided import usable_means
from services.doctor import accelerator, certificates, cluster, keys, memory, ports, processor, transports
from services.doctor.check import Check, examine, in_thread
from services.doctor.config import DoctorConfig
from services.doctor.finding import Examined
from services.doctor.gateway import check_gateway
from services.doctor.handoffs import LIMIT_S, measure_handoffs
from services.doctor.redis_server import check_redis
from services.doctor.workers import check_workers
from services.prefix_index.redis_tls import with_certificate

_REDIS_LIMIT_S = 10.0
_GATEWAY_LIMIT_S = 10.0


def run(config: DoctorConfig) -> list[Examined]:
    """Looks at this machine, and at all that the configuration names."""
    # What a gateway's own parts would log is in the findings.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    return asyncio.run(_run(config))


async def _run(config: DoctorConfig) -> list[Examined]:
    """Measures after all else, which would disturb it."""
    examined = await examine([*_of_machine(), *_of_files(config), *_of_processes(config), *_of_cluster(config)])
    return [*examined, *await examine(list(_of_handoffs(config)))]


def _has_rdma() -> bool:
    return transports.has_rdma(usable_means(os.environ))


def _of_machine() -> Iterator[Check]:
    yield Check("processor", in_thread(processor.check_processor))
    yield Check("memory and limits", in_thread(lambda: memory.check_memory(has_rdma=_has_rdma())))
    yield Check("torch", accelerator.check_accelerators, accelerator.LIMIT_S)
    yield Check("KV transports", in_thread(lambda: transports.check_transports(os.environ)))
    yield Check("ports", in_thread(lambda: ports.check_ports(ports.default_ports())))


def _of_files(config: DoctorConfig) -> Iterator[Check]:
    if (directory := config.mtls) is not None:
        look = in_thread(lambda: certificates.check_between_processes(directory))
        yield Check("certificates between processes", look)
    if (chain := config.tls_cert) is not None and (key := config.tls_key) is not None:
        yield Check("certificate for clients", in_thread(lambda: certificates.check_for_clients(chain, key)))
    if (file := config.keys_file) is not None:
        yield Check("keys", in_thread(lambda: keys.check_keys(file)))


def _of_processes(config: DoctorConfig) -> Iterator[Check]:
    if (url := with_certificate(config.redis_url, config.mtls)) is not None:
        yield Check("redis", lambda: check_redis(url), _REDIS_LIMIT_S)
    if config.worker_addresses:
        yield Check("workers", lambda: check_workers(config.worker_addresses, config.mtls))
    if (admin := config.gateway_url) is not None:
        key = next(iter(config.api_keys), None)
        yield Check("gateway", lambda: check_gateway(admin, key, rdma_here=_has_rdma()), _GATEWAY_LIMIT_S)


def _of_cluster(config: DoctorConfig) -> Iterator[Check]:
    if (namespace := config.namespace) is not None:
        yield Check("kubernetes", in_thread(lambda: cluster.check_cluster(namespace)), cluster.LIMIT_S)


def _of_handoffs(config: DoctorConfig) -> Iterator[Check]:
    if config.measure:
        addresses, mtls = config.worker_addresses, config.mtls
        yield Check("handoffs", lambda: measure_handoffs(addresses, mtls, rdma_here=_has_rdma()), LIMIT_S)
