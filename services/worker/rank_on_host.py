"""The process of a rank above 0 of a worker of several hosts: joins rank 0, loads its part of the model, and runs the
steps that rank 0 sends.

It ends when rank 0 does, and when rank 0 is lost; whoever supervises it starts it again, and it joins the next rank 0.
"""

import gc
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.engine.kernels.ranks import RankLostError
from services.engine.runner.group.connection import ConnectionLostError
from services.engine.runner.group.hosts.joining import join
from services.engine.runner.group.hosts.load_member import Member, accept, load_member
from services.engine.runner.group.rank_main import serve
from services.engine.runner.memory import keep_freed_memory
from services.process.configs import WorkerConfig
from services.process.log_writer import LogWriter
from services.process.logs import configure_logging
from services.process.signals import heeded, ignore_meaningless
from services.protocol.grpc_options import SERVER_OPTIONS, host_port
from services.protocol.model_files.base import ModelError
from services.tls.certificate import TlsError
from services.tls.grpc_ends import open_port
from services.worker.loading import LoadingDisplay
from services.worker.main import certificate_of, place_of

log = structlog.get_logger()


def run_rank(config: WorkerConfig) -> int:
    """Serves until rank 0 ends. Returns the exit code: 0 where rank 0 said that all is over."""
    log_lines = configure_logging(config.process.log_format)
    joined = threading.Event()
    _heed_signals(joined, log_lines)
    keep_freed_memory()
    try:
        health = RankHealth(config)
        member = _join(config, joined, log_lines)
        gc.collect()
        gc.freeze()  # what the model and the libraries made stays
        health.serves()
        log.info("ready", role=config.role.value, rank=config.hosts.rank)
        serve(member.rank)
    except (ModelError, TlsError, ConnectionLostError, RankLostError) as error:
        log_lines.flush()  # why the process ends is its last line
        print(f"baton {config.role} --rank {config.hosts.rank}: {error}", file=sys.stderr)
        return 1
    log.info("rank 0 has ended, and this rank ends")
    log_lines.close()
    return 0


def _join(config: WorkerConfig, joined: threading.Event, log_lines: LogWriter) -> Member:
    """Joins rank 0, and loads. Raises ModelError, TlsError, ConnectionLostError and RankLostError."""
    place = place_of(config, certificate_of(config))
    assert place is not None, "only ranks of several hosts are run here"
    log.info("joining", rank=place.rank, group=place.address)
    invitation = join(place)
    plan = accept(config.workers.engine, invitation, place.rank)
    joined.set()

    def on_lost(reason: str) -> None:
        """Ends the process from within whatever it does: a sum may wait for ranks that do not come."""
        log.error("this rank ends", reason=reason)
        log_lines.flush()
        os._exit(1)

    with LoadingDisplay() as display:
        return load_member(plan, place, invitation, on_lost, display)


class RankHealth:
    """The port of a rank for gRPC's health, where the configuration asks for one."""

    def __init__(self, config: WorkerConfig) -> None:
        """Opens the port. Raises ModelError where that is not possible."""
        self._servicer = health.HealthServicer()
        self._servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        if config.health_port is None:
            return
        self._server = grpc.server(ThreadPoolExecutor(2, "health"), options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        address = host_port(config.host, config.health_port)
        try:
            open_port(self._server, address, None)
        except RuntimeError as error:
            raise ModelError(f"cannot listen on {address}: is the port in use?") from error
        self._server.start()

    def serves(self) -> None:
        """Says that the rank has loaded, as all others have or will have."""
        self._servicer.set("", health_pb2.HealthCheckResponse.SERVING)


def _heed_signals(joined: threading.Event, log_lines: LogWriter) -> None:
    """Ends the process at a signal before it has joined. Later the first one is left to rank 0, which drains and then
    ends this rank, and a further one ends it, and so the group.

    A thread hears of signals by a pipe: the main thread may be in a sum that waits for others.
    """
    ignore_meaningless()
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    for number in heeded():
        signal.signal(number, lambda number, frame: None)  # the pipe has it

    def wait() -> None:
        os.read(told, 1)
        if joined.is_set():
            log.warning("this rank ends when rank 0 does; another signal ends it, and the worker, at once")
            os.read(told, 1)
        log_lines.flush()
        os._exit(1 if joined.is_set() else 0)

    threading.Thread(target=wait, name="signals", daemon=True).start()
