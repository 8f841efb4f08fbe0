"""`baton up` from start to end: the ports, the demo model where it is wanted, then the launcher."""

import asyncio
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from services.launcher import banner, certificates, commands, control, display, ports, random_model
from services.launcher.child import ChildFailed
from services.launcher.launcher import Launcher
from services.launcher.members import Start
from services.launcher.private_directory import private_directory
from services.process.backoff import Backoff
from services.process.configs import UpConfig
from services.tls.certificate import TlsError

# For a child to end after its drain. Workers that outlive the gateway have nothing to drain, so no budget adds up.
_ENDING_S = 5.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 30.0  # before a child that died is started again


def run(config: UpConfig) -> int:
    """Serves until it is told to end. Returns the exit code: 0 after a signal, 1 with one line on stderr otherwise."""
    try:
        config = _with_ports(config)
        worker_ports = ports.free_ports("127.0.0.1", commands.num_workers(config))
        http = ports.bind(config.serving.host, config.serving.port)
        admin = ports.bind(config.serving.admin_host, config.serving.admin_port)
    except ports.PortUnavailable as error:
        return _refuse(str(error))
    with http, admin, private_directory() as directory, display.Display(config.process.log_format) as screen:
        model = config.workers.engine.model
        if config.makes_model and not random_model.exists(model):
            screen.starting("random model", f"making it in {model}")
            try:
                random_model.make(model)
            except OSError as error:
                return _refuse(f"the random model cannot be made in {model}: {error.strerror}")
            screen.finished("random model")
        return _serve(config, worker_ports, commands.GatewayFds(http.fileno(), admin.fileno()), directory, screen)


def _serve(
    config: UpConfig,
    worker_ports: list[int],
    fds: commands.GatewayFds,
    directory: Path,
    screen: display.Display,
) -> int:
    if config.tls:
        certificates.make(directory, config.serving.host)
        config = commands.with_certificates(config, directory)
    redis_socket = None
    if config.process.redis_url is None and commands.has_redis():
        redis_socket = directory / "redis.sock"
        config = commands.with_redis(config, redis_socket)
    try:
        stack = commands.stack(config, worker_ports, redis_socket, fds)
        start = Start(
            partial(commands.environment, os.environ),
            screen,
            lambda: Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S),
            config.process.drain_timeout_s + _ENDING_S,
        )
        launcher = Launcher(stack, start, control.socket_path(config.serving.host, config.serving.port))
        asyncio.run(launcher.run(lambda: banner.print_ready(config)))
    except TlsError as error:
        return _refuse(str(error))
    except ChildFailed as failure:
        return _report(failure, screen)
    return 0


def _with_ports(config: UpConfig) -> UpConfig:
    serving = config.serving
    port = _port(serving.host, serving.port, "--port")
    grpc_port = _port(serving.host, serving.grpc_port, "--grpc-port")
    admin_port = _port(serving.admin_host, serving.admin_port, "--admin-port")
    return replace(config, serving=replace(serving, port=port, grpc_port=grpc_port, admin_port=admin_port))


def _port(host: str, port: int, option: str) -> int:
    if port == 0:
        return ports.free_ports(host, 1)[0]
    try:
        ports.check(host, port)
    except ports.PortUnavailable as error:
        raise ports.PortUnavailable(f"{error}; choose another with {option}") from error
    return port


def _report(failure: ChildFailed, screen: display.Display) -> int:
    crashed = failure.how.startswith("signal") or any(line.startswith("Traceback") for line in failure.lines)
    if crashed or failure.hopeless:  # not a refusal in words, so every word may help
        for line in failure.lines:
            screen.line(failure.name, line)
    return _refuse(str(failure))


def _refuse(text: str) -> int:
    sys.stderr.write(f"baton: {text}\n")
    return 1
