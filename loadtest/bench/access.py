"""The access to a server: its address, the key that it asks for, and the authority of its certificate."""

import argparse
import ipaddress
import os
import ssl
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.bench.settings import KEY_VARIABLE
from loadtest.cannot_run import CannotRun
from loadtest.http_stream import Address

_PORTS = {"http": 80, "https": 443}
_API = "/v1"  # which users of OpenAI's clients have in their URLs


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a benchmark that `local_address` reads."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, on this machine (%(default)s)")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"a key, where the server asks for one (default: the first of {KEY_VARIABLE})"
    )
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="authority of an https server's certificate (default: the system's)"
    )


def local_address(url: str, api_key: str | None, authority: Path | None) -> Address:
    """The address in a URL of a server on this machine, with what is needed to speak to it. Raises CannotRun."""
    check_local(url)
    return address(url, api_key, authority)


def check_local(url: str) -> None:
    """Raises CannotRun where the server of a URL is on another machine."""
    if not is_local(_address(url, None)):
        raise CannotRun(f"{url}: load is for servers on this machine only (127.0.0.1, ::1, localhost)")


def address(url: str, api_key: str | None, authority: Path | None) -> Address:
    """The address in a URL, with what is needed to speak to it. Raises CannotRun, also for a key sent as plain text.

    api_key: None: that of the environment, the first where there are several.
    """
    found = _address(url, authority)
    key = (api_key or os.environ.get(KEY_VARIABLE, "")).partition(",")[0].strip() or None
    if key is not None and found.tls is None and not is_local(found):
        raise CannotRun(
            f"{url}: a key (--api-key, or {KEY_VARIABLE} in the environment) is not sent as plain text; name the "
            "server by https://"
        )
    return replace(found, api_key=key)


def admin_address(url: str, authority: Path | None) -> Address:
    """The address of a Baton's admin port, whose metrics ask for no key: none is sent. Raises CannotRun.

    authority: of https; the port may be plain text where the one for clients is not.
    """
    return _address(url, authority if url.startswith("https:") else None)


def _address(url: str, authority: Path | None) -> Address:
    """The address in a URL, without a key. Raises CannotRun."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise CannotRun(f"{url}: {error}") from error
    if parts.scheme not in _PORTS:
        raise CannotRun(f"{url}: only http:// and https:// are spoken here")
    if not parts.hostname or parts.query or parts.fragment or not url.isascii() or set("@ ") & set(url):
        raise CannotRun(f"{url}: name a server as http://HOST:PORT; a key is no part of it")
    if authority is not None and parts.scheme == "http":
        raise CannotRun(f"--ca is for https, and {url} is not")
    tls = _trusting(authority) if parts.scheme == "https" else None
    prefix = parts.path.rstrip("/").removesuffix(_API)
    return Address(parts.hostname, port or _PORTS[parts.scheme], tls=tls, prefix=prefix)


def is_local(address: Address) -> bool:
    """Says whether a server is on this machine, by its host alone."""
    if address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False


def _trusting(authority: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:  # which ssl's own errors are too
        raise CannotRun(f"{authority} has no certificate of an authority: {error}") from error
