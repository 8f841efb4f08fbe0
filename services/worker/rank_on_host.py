"""The process of a rank above 0 of a worker of several hosts: joins rank 0, loads its part of the model, and runs the
steps that rank 0 sends.

It ends when rank 0 does, and when rank 0 is lost; whoever supervises it starts it again, and it joins the next rank 0.
"""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import structlog

from kvtransfer.transports import ucx
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
from services.protocol.grpc_options import host_port
from services.protocol.model_files.base import ModelError
from services.tls.certificate import TlsError
from services.tls.files import CertificateFiles
from services.worker.loading import LoadingDisplay
from services.worker.main import certificate_of, place_of
from services.worker.rank_parts import RankPart
from services.worker.rank_port import RankPort

_GRACE_S = 2.0  # in which rank 0 ends a rank whose connection for KV it has closed

log = structlog.get_logger()


def run_rank(config: WorkerConfig) -> int:
    """Serves until rank 0 ends. Returns the exit code: 0 where rank 0 said that all is over."""
    log_lines = configure_logging(config.process.log_format)
    joined = threading.Event()
    os.environ.update(ucx.settings(os.environ))  # before there are threads
    _heed_signals(joined, log_lines)
    keep_freed_memory()

    def on_lost(reason: str) -> None:
        """Ends the process from within whatever it does: a sum may wait for ranks that do not come."""
        log.error("this rank ends", reason=reason)
        log_lines.flush()
        os._exit(1)

    try:
        tls = certificate_of(config)
        port = RankPort(config.host, config.port, tls, config.health_port)
        member = _join(config, tls, joined, on_lost)
        address = host_port(config.advertised_host or config.host, port.port)
        part = RankPart(config.hosts.rank or 0, member.blocks, port, address).serve(member.kv, on_lost)
        threading.Thread(target=_end_after, args=(part, on_lost), name="part's end", daemon=True).start()
        gc.collect()
        gc.freeze()  # what the model and the libraries made stays
        port.serves()
        log.info("ready", role=config.role.value, rank=config.hosts.rank)
        serve(member.rank)
    except (ModelError, TlsError, ConnectionLostError, RankLostError) as error:
        log_lines.flush()  # why the process ends is its last line
        print(f"baton {config.role} --rank {config.hosts.rank}: {error}", file=sys.stderr)
        return 1
    log.info("rank 0 has ended, and this rank ends")
    log_lines.close()
    return 0


def _join(
    config: WorkerConfig, tls: CertificateFiles | None, joined: threading.Event, on_lost: Callable[[str], None]
) -> Member:
    """Joins rank 0, and loads. Raises ModelError, TlsError, ConnectionLostError and RankLostError."""
    place = place_of(config, tls)
    assert place is not None, "only ranks of several hosts are run here"
    log.info("joining", rank=place.rank, group=place.address)
    invitation = join(place)
    plan = accept(config.workers.engine, invitation, place.rank)
    joined.set()

    with LoadingDisplay() as display:
        return load_member(plan, place, invitation, on_lost, display)


def _end_after(part: threading.Thread, on_lost: Callable[[str], None]) -> None:
    """Ends a rank whose part is served no longer, where rank 0 has not ended it: no block could be handed over."""
    part.join()
    time.sleep(_GRACE_S)
    on_lost("rank 0 has closed the connection for KV, or it is lost")


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
