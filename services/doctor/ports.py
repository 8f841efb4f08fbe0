"""Ports of Baton on this machine: free, or whose; and whether strangers could read what is said there."""

import socket
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.config.hosts import is_loopback
from services.config.option import options_of
from services.doctor.finding import CannotCheck, Finding, note, ok, warning
from services.process.configs import WORKER_PORTS, ServingSettings

_TIMEOUT_S = 1.0
_MODULE = "services.cli"
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_SERVING = ("port", "grpc_port", "admin_port")


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that listens. owner: None where another user's process has it."""

    host: str
    port: int
    owner: str | None
    is_baton: bool

    @property
    def is_reached_by_others(self) -> bool:
        """True for an address that other machines may reach."""
        return not is_loopback(self.host)


def default_ports() -> dict[int, str]:
    """Returns the ports that processes take where nobody says otherwise, and the flags that choose others."""
    serving = {field.default: field.flag for field in options_of(ServingSettings) if field.name in _SERVING}
    return serving | {port: f"--port of {role}" for role, port in WORKER_PORTS.items()}


def check_ports(ports: dict[int, str]) -> list[Finding]:
    """Looks at these ports, of which each has the flag that chooses another. Raises CannotCheck."""
    listeners = listening()
    taken = [listener for listener in listeners if listener.port in ports]
    free = sorted(ports.keys() - {listener.port for listener in taken})
    findings = [ok("free", ", ".join(map(str, free)))] if free else []
    findings += [describe(listener, ports[listener.port]) for listener in taken]
    exposed = [listener for listener in listeners if listener.is_baton and listener.is_reached_by_others]
    with ThreadPoolExecutor(max(len(exposed), 1)) as pool:  # a port that says nothing takes its whole time
        speak_tls = pool.map(lambda listener: has_tls(listener.host, listener.port), exposed)
        return [*findings, *map(check_exposed, exposed, speak_tls)]


def listening() -> list[Listener]:
    """Returns all TCP sockets that listen on this machine. Raises CannotCheck where the system does not tell."""
    try:
        found = psutil.net_connections("tcp")
    except psutil.AccessDenied as reason:
        raise CannotCheck("this system tells only root which ports are in use") from reason
    places = {
        (each.laddr.ip, each.laddr.port, each.pid) for each in found if each.laddr and each.status == psutil.CONN_LISTEN
    }
    return [_listener(*place) for place in sorted(places, key=str)]


def _listener(host: str, port: int, pid: int | None) -> Listener:
    try:
        command = [] if pid is None else psutil.Process(pid).cmdline()
    except psutil.Error:  # it ended just now, or belongs to another user
        command = []
    owner = f"{Path(command[0]).name} (process {pid})" if command else None
    return Listener(host, port, owner, is_baton(command))


def is_baton(command: Sequence[str]) -> bool:
    """Tells whether a command line is that of one of Baton's processes."""
    return _MODULE in command or any(Path(word).name == "baton" for word in command[:2])


def describe(listener: Listener, flag: str) -> Finding:
    """Tells who has a port that Baton would take."""
    name = f"port {listener.port} at {listener.host}"
    if listener.is_baton:
        return ok(name, "Baton's")
    if listener.owner is None:
        return note(name, "in use, by a process that this user may not look at", f"choose another with {flag}")
    return warning(name, f"in use by {listener.owner}", f"choose another with {flag}")


def check_exposed(listener: Listener, tls: bool) -> Finding:
    """Judges a port of Baton's that other machines may reach."""
    name = f"reached at {listener.host}, port {listener.port}"
    if tls:
        return ok(name, "TLS")
    found = "plain text, or UCX's: anyone on that network can read it, and write"
    advice = "--mtls or --tls-cert; unset UCX_NET_DEVICES; a health port may stay as it is"
    return warning(name, found, advice)


def has_tls(host: str, port: int) -> bool:
    """Tells whether a handshake begins there. Whose the certificate is does not matter."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])  # gRPC's servers want it
    try:
        with socket.create_connection((_EVERYWHERE.get(host, host), port), timeout=_TIMEOUT_S) as plain:
            context.wrap_socket(plain).close()
    except OSError:
        return False
    return True
