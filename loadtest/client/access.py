"""The access to a server: its address, the key that it asks for, and the authority of its certificate."""

import argparse
import ipaddress
import os
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.cannot_run import CannotRun
from loadtest.http_stream import Address

_KEY_VARIABLE = "BATON_API_KEY"
_PORTS = {"http": 80, "https": 443}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `local_address` reads."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, on this machine (%(default)s)")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"a key, where the server asks for one (default: the first of {_KEY_VARIABLE})"
    )
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="authority of an https server's certificate (default: the system's)"
    )


def local_address(url: str, options: argparse.Namespace) -> Address:
    """The address in a URL of a server on this machine, with what is needed to speak to it. Raises CannotRun."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme not in _PORTS:
        raise CannotRun(f"{url}: only http:// and https:// are spoken here")
    if host != "localhost" and not _is_loopback(host):
        raise CannotRun(f"{url}: load is for servers on this machine only (127.0.0.1, ::1, localhost)")
    if options.ca is not None and parts.scheme == "http":
        raise CannotRun(f"--ca is for https, and {url} is not")
    key = options.api_key or os.environ.get(_KEY_VARIABLE, "").partition(",")[0].strip() or None
    tls = _trusting(options.ca) if parts.scheme == "https" else None
    return Address(host, parts.port or _PORTS[parts.scheme], key, tls)


def _trusting(authority: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:  # which ssl's own errors are too
        raise CannotRun(f"{authority} has no certificate of an authority: {error}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
