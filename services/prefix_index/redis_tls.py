"""TLS to Redis: 1.3 and nothing older, with files that are read again for a new connection where they changed.

The files are those that the URL names (`ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`), or those of the process.
"""

import ssl
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import structlog
from redis.asyncio import ConnectionPool, RedisCluster
from redis.asyncio.connection import RedisSSLContext, SSLConnection
from redis.exceptions import ConnectionError as RedisConnectionError

from services.files.followed import FileContent, FollowedFiles
from services.tls.certificate import Certificate, TlsError, as_file, words_of
from services.tls.files import NOT_TAKEN, READ_AGAIN, CertificatePaths, check_for_strangers

LOWEST_VERSION = ssl.TLSVersion.TLSv1_3
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")

log = structlog.get_logger()


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
        self._files: FollowedFiles[_Made] | None = None

    def current(self, settings: RedisSSLContext) -> ssl.SSLContext:
        """The context for a new connection: of the newest files that can be used. Raises TlsError where none could."""
        if self._files is None:
            named = (settings.ca_certs, settings.certfile, settings.keyfile)
            paths = [Path(file) for file in named if file is not None]
            self._files = FollowedFiles(paths, partial(_made, settings), TlsError, NOT_TAKEN)
        if self._files.look():
            log.info(READ_AGAIN, file=settings.certfile or settings.ca_certs)
        return self._files.value.context


class FreshConnection(SSLConnection):
    """A connection that asks for the context each time it connects; the library's own keeps its first one."""

    def __init__(self, *, contexts: Contexts, **options: Any) -> None:
        super().__init__(**options)
        self._contexts = contexts

    async def connect_check_health(self, *arguments: Any, **options: Any) -> None:
        """Connects, unless it is connected. `connect` comes here, and so does a command that finds no connection.

        Raises redis' ConnectionError, for files that cannot be used as for a server that cannot be reached.
        """
        if not self.is_connected:
            try:
                self.ssl_context.context = self._contexts.current(self.ssl_context)
            except TlsError as error:
                raise RedisConnectionError(str(error)) from error
        await super().connect_check_health(*arguments, **options)


def use_fresh_connections(pool: ConnectionPool) -> None:
    """Tells a pool that makes TLS connections to make fresh ones. No other pool is changed."""
    if pool.connection_class is SSLConnection:
        pool.connection_class = FreshConnection
        pool.connection_kwargs["contexts"] = Contexts()


def use_fresh_connections_of_cluster(cluster: RedisCluster) -> None:
    """Tells a cluster's client to do likewise, before it is used: for its first nodes and those that it will find."""
    manager = cluster.nodes_manager
    if manager.connection_kwargs["connection_class"] is SSLConnection:
        contexts = Contexts()
        manager.connection_kwargs.update(connection_class=FreshConnection, contexts=contexts)
        for node in manager.startup_nodes.values():
            node.connection_class = FreshConnection
            node.connection_kwargs["contexts"] = contexts


@dataclass(frozen=True, slots=True)
class _Made:
    """A context, and what of the files is in it."""

    certificate: Certificate | None  # that this process shows
    authorities: bytes | None  # None: those of the system
    context: ssl.SSLContext = field(compare=False)


def _made(settings: RedisSSLContext, contents: Sequence[FileContent], older: _Made | None) -> _Made:
    data = {content.path: content.data for content in contents}

    def named(file: str | None) -> bytes | None:
        return None if file is None else data[Path(file)]

    certificate, authorities, password = None, named(settings.ca_certs), settings.password or ""
    if settings.certfile is not None:
        key = Path(settings.keyfile or settings.certfile)  # one file may have both
        certificate = Certificate(data[Path(settings.certfile)], data[key])
        before = None if older is None else older.certificate
        check_for_strangers(certificate, before, Path(settings.certfile), key, password)
    if older is not None and (older.certificate, older.authorities) == (certificate, authorities):
        return older
    try:
        with nullcontext() if authorities is None else as_file(authorities) as cafile:
            context = _context(settings, cafile)
        if certificate is not None:
            certificate.load_into(context, password)
    except OSError as error:
        raise TlsError(f"the files of the connection to Redis cannot be used: {words_of(error)}") from error
    return _Made(certificate, authorities, context)


def _context(settings: RedisSSLContext, cafile: str | None) -> ssl.SSLContext:
    """The context that the library makes, but for the system's authorities, which count where the URL names none."""
    context = ssl.create_default_context(cafile=cafile, capath=settings.ca_path, cadata=settings.ca_data)
    context.check_hostname = settings.check_hostname
    context.verify_mode = settings.cert_reqs
    context.minimum_version = LOWEST_VERSION
    for flag in settings.include_verify_flags or ():
        context.verify_flags |= flag
    for flag in settings.exclude_verify_flags or ():
        context.verify_flags &= ~flag
    if settings.ciphers is not None:
        context.set_ciphers(settings.ciphers)
    return context
