"""TLS to Redis: 1.3 and nothing older, with files that are read again for a new connection where they changed.

The files are those that the URL names (`ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`), or those of the process.
"""

import ssl
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis.asyncio import ConnectionPool, RedisCluster
from redis.asyncio.connection import RedisSSLContext, SSLConnection

from services.tls.files import CertificatePaths

LOWEST_VERSION = ssl.TLSVersion.TLSv1_3
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def with_certificate(url: str | None, mtls: Path | None) -> str | None:
    """The URL with the authority and the certificate of this directory, unless it is not TLS or names files itself."""
    if url is None or mtls is None or not url.startswith("rediss"):
        return url
    parts = urlsplit(url)
    named = parse_qsl(parts.query, keep_blank_values=True)
    if any(name in _FILES for name, _ in named):
        return url
    paths = CertificatePaths.in_directory(mtls)
    files = zip(_FILES, (paths.authorities, paths.chain, paths.key), strict=True)
    return urlunsplit(parts._replace(query=urlencode([*named, *((name, str(path)) for name, path in files)])))


class Contexts:
    """The TLS context of a server's connections: made anew where a file has changed."""

    def __init__(self) -> None:
        self._made: tuple[object, ssl.SSLContext] | None = None

    def current(self, settings: RedisSSLContext) -> ssl.SSLContext:
        """The context for a new connection. Raises OSError for files that cannot be used."""
        files = (settings.ca_certs, settings.certfile, settings.keyfile)
        stamp = [None if file is None else Path(file).stat().st_mtime_ns for file in files]
        if self._made is None or self._made[0] != stamp:
            self._made = stamp, _context(settings)
        return self._made[1]


class FreshConnection(SSLConnection):
    """A connection that asks for the context each time it connects; the library's own keeps its first one."""

    def __init__(self, *, contexts: Contexts, **options: Any) -> None:
        super().__init__(**options)
        self._contexts = contexts

    async def connect_check_health(self, *arguments: Any, **options: Any) -> None:
        """Connects, unless it is connected. `connect` comes here, and so does a command that finds no connection."""
        if not self.is_connected:
            self.ssl_context.context = self._contexts.current(self.ssl_context)
        await super().connect_check_health(*arguments, **options)


def use_fresh_connections(pool: ConnectionPool) -> None:
    """Has a pool that makes TLS connections make fresh ones. No other pool is changed."""
    if pool.connection_class is SSLConnection:
        pool.connection_class = FreshConnection
        pool.connection_kwargs["contexts"] = Contexts()


def use_fresh_connections_of_cluster(cluster: RedisCluster) -> None:
    """Has a cluster's client do likewise, before it is used: for its first nodes and those that it will find."""
    manager = cluster.nodes_manager
    if manager.connection_kwargs["connection_class"] is SSLConnection:
        contexts = Contexts()
        manager.connection_kwargs.update(connection_class=FreshConnection, contexts=contexts)
        for node in manager.startup_nodes.values():
            node.connection_class = FreshConnection
            node.connection_kwargs["contexts"] = contexts


def _context(settings: RedisSSLContext) -> ssl.SSLContext:
    """The context that the library makes, but for the system's authorities, which count where the URL names none."""
    context = ssl.create_default_context(cafile=settings.ca_certs, capath=settings.ca_path, cadata=settings.ca_data)
    context.check_hostname = settings.check_hostname
    context.verify_mode = settings.cert_reqs
    context.minimum_version = LOWEST_VERSION
    for flag in settings.include_verify_flags or ():
        context.verify_flags |= flag
    for flag in settings.exclude_verify_flags or ():
        context.verify_flags &= ~flag
    if settings.certfile:
        context.load_cert_chain(settings.certfile, settings.keyfile, settings.password)
    if settings.ciphers is not None:
        context.set_ciphers(settings.ciphers)
    return context
