"""Refusals of plain text on addresses that other machines reach, and of certificates that contradict each other."""

import json
import sys
from pathlib import Path

import typer

from services.config import LogFormat
from services.config.hosts import is_loopback, split_address
from services.config.option import Refusal
from services.process.configs import ProcessSettings, ServingSettings, UpConfig, WorkerConfig
from services.process.terminal import has_colours


def check_worker(config: WorkerConfig) -> None:
    """Raises Refusal for plain text that other machines reach and the user does not allow. Says so where he does."""
    if config.process.mtls is not None or is_loopback(config.host):
        return
    danger = "anyone on that network can read and write prompts, answers and KV, and control this worker"
    if not config.allow_plaintext:
        raise Refusal(f"--host {config.host} needs --mtls or --allow-plaintext: without TLS, {danger}")
    _warn(f"plain text at --host {config.host}: {danger}", config.process.log_format)


def check_group(config: WorkerConfig) -> None:
    """Raises Refusal for a group of ranks in plain text, as `check_worker` does for a worker."""
    group = config.hosts.group
    if group is None or config.process.mtls is not None or is_loopback(split_address(group)[0]):
        return
    danger = "anyone on that network can read and change what the ranks compute, or join in the place of one"
    if not config.allow_plaintext:
        raise Refusal(f"--group {group} needs --mtls or --allow-plaintext: without TLS, {danger}")
    _warn(f"plain text at --group {group}: {danger}", config.process.log_format)


def check_serving(serving: ServingSettings, process: ProcessSettings, *, makes_tls: bool = False) -> None:
    """Raises Refusal for half of a certificate, or for plain text as `check_worker` does.

    makes_tls: the command makes a certificate.
    """
    check_both_named(serving.tls_cert, serving.tls_key)
    if makes_tls or serving.tls_cert is not None:
        return
    dangers = {
        ("--host", serving.host): "anyone on that network can read and change prompts and answers",
        ("--admin-host", serving.admin_host): "anyone on that network can read keys with the right admin, and use them",
    }
    exposed = {place: danger for place, danger in dangers.items() if not is_loopback(place[1])}
    for (flag, host), danger in exposed.items():
        if not serving.allow_plaintext:
            needs = "--tls-cert and --tls-key, or --allow-plaintext"
            raise Refusal(f"{flag} {host} needs {needs}: without TLS, {danger}")
        _warn(f"plain text at {flag} {host}: {danger}", process.log_format)


def check_both_named(tls_cert: Path | None, tls_key: Path | None) -> None:
    """Raises Refusal for half of a certificate."""
    if (tls_cert is None) != (tls_key is None):
        raise Refusal("--tls-cert and --tls-key belong together: name both")


def check_own_tls(config: UpConfig) -> None:
    """Raises Refusal where the certificates of `baton up --tls` contradict others, or Redis would not know them."""
    if not config.tls:
        return
    if config.process.mtls is not None or config.serving.tls_cert is not None:
        raise Refusal("--tls makes all certificates: leave --mtls, --tls-cert and --tls-key out")
    url = config.process.redis_url or ""
    if url.startswith("rediss") and "ssl_ca_certs=" not in url:
        raise Refusal(
            "--tls makes an authority that the Redis of --redis-url does not know: name Redis' own in the URL, as "
            "rediss://HOST:PORT?ssl_ca_certs=FILE"
        )


def _warn(text: str, log_format: LogFormat) -> None:
    """One line on stderr, red on a terminal."""
    if log_format is LogFormat.JSON:
        typer.echo(json.dumps({"level": "warning", "event": text}), err=True)
    else:
        typer.secho(f"baton: {text}", fg=typer.colors.RED, bold=True, err=True, color=has_colours(sys.stderr))
