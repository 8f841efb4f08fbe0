"""A worker process of either role: loads the model, serves until it is told to end."""

import asyncio
import gc
import os
import sys

import structlog

from kvtransfer.transports import ucx
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.remote import PartLink
from services.config import TransportName, WorkerRole
from services.config.hosts import split_address
from services.engine.runner.group.hosts.host_ranks import HostRanks
from services.engine.runner.group.hosts.place import HostPlace
from services.engine.runner.load import LoadedModel, load_runner
from services.engine.runner.memory import keep_freed_memory, populate
from services.engine.sampling.guidance import Guidance
from services.engine.schedulers.base import Scheduler
from services.prefix_index.redis_tls import with_certificate
from services.process.configs import WorkerConfig
from services.process.gc_watch import GcWatch
from services.process.logs import configure_logging
from services.process.signals import on_ending_signals
from services.protocol.grpc_options import host_port
from services.protocol.model_files.base import ModelError, ModelFiles
from services.protocol.model_files.info import model_digest
from services.protocol.model_files.open import open_model
from services.tls.certificate import TlsError
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.rank_contexts import RankTls
from services.tls.roles import CertificateRole
from services.worker.engine_thread import SWITCH_INTERVAL_S, no_pause
from services.worker.loading import LoadingDisplay
from services.worker.rank_parts import RankChannel
from services.worker.transports import make_group_transports, make_transports
from services.worker.worker import MakeTransports, Worker, WorkerError, WorkerParts

log = structlog.get_logger()


def run_worker(config: WorkerConfig, scheduler: Scheduler) -> int:
    """Runs a worker until a signal, which drains it; a second one ends it. Returns the exit code."""
    log_lines = configure_logging(config.process.log_format)
    gc_watch = GcWatch(config.process.logged_gc_types)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    os.environ.update(ucx.settings(os.environ))  # before there are threads
    try:
        tls = certificate_of(config)  # before the model, which takes long
        parts = _load(config, scheduler, gc_watch, tls)
        worker = Worker(parts)
        exit_code = asyncio.run(_serve(worker, host_port(config.host, config.port)))
    except (ModelError, TlsError, TransportError, WorkerError) as error:
        log_lines.flush()  # why the process ends is its last line
        print(f"baton {config.role}: {error}", file=sys.stderr)
        return 1
    if not worker.threads_ended:
        log.error("a thread of the engine does not end; the process does")
        log_lines.close()
        os._exit(exit_code)  # the interpreter's own end would wait for the thread, or take its memory from under it
    if parts.group is not None:
        parts.group.close()
    return exit_code


def certificate_of(config: WorkerConfig) -> CertificateFiles | None:
    """Reads the certificate of a worker; None: it speaks plain text. Raises TlsError."""
    if config.process.mtls is None:
        return None
    roles = (CertificateRole.WORKER, CertificateRole(config.role.value))
    return CertificateFiles(CertificatePaths.in_directory(config.process.mtls), roles)


def place_of(config: WorkerConfig, tls: CertificateFiles | None) -> HostPlace | None:
    """Returns the place of this process among the ranks of a worker of several hosts; None: it has one host."""
    hosts = config.hosts
    if hosts.rank is None or hosts.world_size is None or hosts.group is None:
        return None
    host, port = split_address(hosts.group)
    of_ranks = None if tls is None else RankTls(tls, CertificateRole(config.role.value))
    return HostPlace(rank=hosts.rank, size=hosts.world_size, host=host, port=port, tls=of_ranks)


def _load(config: WorkerConfig, scheduler: Scheduler, gc_watch: GcWatch, tls: CertificateFiles | None) -> WorkerParts:
    engine = config.workers.engine
    with LoadingDisplay() as display:
        loaded = load_runner(engine, display, config.process.log_format, place_of(config, tls))
    if config.role is WorkerRole.DECODE and not loaded.runner.generates:
        raise ModelError("this model generates nothing: it has prefill workers, and no decode workers")
    for notice in loaded.notices:
        log.warning(notice)
    if engine.kv_memory_bytes is not None:  # who names a size means to have it; the default may never be used
        populate(loaded.runner.kv_memory())
    return WorkerParts(
        role=config.role,
        runner=loaded.runner,
        kernels=loaded.kernels,
        weights=loaded.weights,
        scheduler=scheduler,
        make_transports=_transports(config.workers.transport, loaded.hosts),
        fingerprint=loaded.fingerprint,
        eos_token_ids=loaded.eos_token_ids,
        max_model_len=loaded.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        model=model_digest(open_model(engine.model)),
        redis_url=with_certificate(config.process.redis_url, config.process.mtls),
        advertised_host=config.advertised_host or config.host,
        gc_watch=gc_watch,
        pipeline_depth=loaded.pipeline_depth,
        guidance=_guidance(open_model(engine.model), loaded),
        decode_pause_s=no_pause if loaded.cores is None else loaded.cores.decode_pause_s,
        num_ranks=engine.num_ranks,
        group=loaded.group,
        drain_timeout_s=config.process.drain_timeout_s,
        tls=tls,
        health_address=None if config.health_port is None else host_port(config.host, config.health_port),
    )


def _transports(name: TransportName, hosts: HostRanks | None) -> MakeTransports:
    """Returns how transports are made. hosts: the ranks on other hosts; None: there are none."""
    if hosts is None:
        return make_transports(name)
    return make_group_transports(name, [PartLink(rank, RankChannel(hosts.kv(rank))) for rank in hosts.ranks])


def _guidance(files: ModelFiles, loaded: LoadedModel) -> Guidance | None:
    """Returns None for a model that generates nothing, and, with a warning, for a tokenizer that it cannot read."""
    if not loaded.runner.generates:
        return None
    try:
        return Guidance(files.tokenizer().decode(), loaded.vocab_size, loaded.eos_token_ids)
    except (ModelError, ValueError) as error:
        log.warning("answers cannot be made to match grammars", reason=str(error))
        return None


async def _serve(worker: Worker, address: str) -> int:
    await worker.start(address)
    on_ending_signals(worker.drain, worker.end)
    gc.collect()
    gc.freeze()  # what the model and the libraries made stays; no collection needs to look at it again
    reason = await worker.ended
    if reason is not None:
        log.error("this worker ends", reason=reason)
    await worker.stop()
    return 0 if reason is None else 1
