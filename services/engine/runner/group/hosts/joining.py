"""The way of a rank into a group on other hosts: it tries until rank 0 is there, and takes its configuration."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import structlog

from services.config.engine import EngineConfig
from services.config.option import Refusal, options_of
from services.engine.runner.group.connection import Connection, ConnectionLostError, connect
from services.engine.runner.group.hosts.group_port import GREETING_S
from services.engine.runner.group.hosts.host_messages import (
    BATON_VERSION,
    MOST_GREETING_BYTES,
    Hello,
    KvTaken,
    RefusedError,
    StrangeMessageError,
    Terms,
)
from services.engine.runner.group.hosts.host_ranks import LOADING_PATIENCE_S
from services.engine.runner.group.hosts.place import HostPlace
from services.process import child_config
from services.process.backoff import Backoff
from services.protocol.model_files.base import ModelError

_FIRST_S, _LONGEST_S = 0.1, 5.0  # between two tries
_AGAIN_S = LOADING_PATIENCE_S + 15.0  # for which a rank's old place may still be taken: such a refusal is not believed
_TOLD_S = 30.0  # between two log lines of the same failure
_OWN = ("model", "num_threads", "worker_index", "num_workers")  # of each host

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class Invitation:
    """A connection to rank 0, which has told the terms."""

    steps: Connection
    terms: Terms


def join(place: HostPlace) -> Invitation:
    """Connects to rank 0, again and again until it is there. Raises ModelError where it refuses this rank."""
    pause, told, refused_since = Backoff(_FIRST_S, _LONGEST_S), _Told(), None
    while True:
        try:
            return _try(place)
        except RefusedError as error:
            refused_since = refused_since or time.monotonic()
            if not error.again or time.monotonic() - refused_since > _AGAIN_S:
                raise ModelError(f"rank 0 at {place.address} refuses this one: {error}") from error
            told.tell("rank 0 has no place for this rank yet", str(error))
        except (ConnectionLostError, StrangeMessageError) as error:
            refused_since = None
            told.tell("waiting for rank 0", str(error))
        time.sleep(pause.next_s())


def connect_kv(place: HostPlace, terms: Terms) -> Connection:
    """Makes the second connection to rank 0, for KV, which has it then. Raises ModelError."""
    pause, began = Backoff(_FIRST_S, _LONGEST_S), time.monotonic()
    while True:
        try:
            return _try_kv(place, terms)
        except RefusedError as error:
            raise ModelError(f"rank 0 refuses the connection for KV: {error}") from error
        except (ConnectionLostError, StrangeMessageError) as error:
            if time.monotonic() - began > LOADING_PATIENCE_S:
                raise ModelError(f"rank 0 does not take the connection for KV: {error}") from error
        time.sleep(pause.next_s())


def _try_kv(place: HostPlace, terms: Terms) -> Connection:
    connection = _greet(place, terms.group)
    try:
        KvTaken.unpack(connection.receive())
    except BaseException:
        connection.close()
        raise
    connection.set_patience(LOADING_PATIENCE_S)
    connection.beat()
    return connection


def engine_of(own: EngineConfig, terms: Terms) -> EngineConfig:
    """Returns rank 0's configuration, with what each host has of its own. Raises ModelError for what contradicts it."""
    try:
        leading: EngineConfig = child_config.read(EngineConfig, {**terms.engine, "model": str(own.model)})
    except (Refusal, ValueError, TypeError) as error:
        raise ModelError(f"rank 0 has another configuration: {error}") from error
    flags = {field.name: field.flag for field in options_of(EngineConfig)}
    for field in fields(EngineConfig):
        mine, theirs = getattr(own, field.name), getattr(leading, field.name)
        if field.name not in _OWN and mine not in (field.default, theirs):
            raise ModelError(f"{flags[field.name]} {mine} contradicts rank 0, which has {theirs}")
    return replace(leading, **{name: getattr(own, name) for name in _OWN})


def settings_of(engine: EngineConfig) -> Mapping[str, Any]:
    """Returns the settings that all ranks have in common, for `Terms`."""
    return {name: value for name, value in asdict(engine).items() if name not in _OWN}


def _try(place: HostPlace) -> Invitation:
    steps = _greet(place, "")
    try:
        terms = Terms.unpack(steps.receive())
    except BaseException:
        steps.close()
        raise
    steps.set_patience(LOADING_PATIENCE_S)
    steps.beat()
    return Invitation(steps, terms)


def _greet(place: HostPlace, group: str) -> Connection:
    connection = connect(place.host, place.port, place.tls, most_bytes=MOST_GREETING_BYTES, patience_s=GREETING_S)
    try:
        connection.send(Hello(version=BATON_VERSION, rank=place.rank, size=place.size, group=group).pack())
    except BaseException:
        connection.close()
        raise
    return connection


class _Told:
    """Tells a person of a failure when it is new, and again after a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last, self._at = clock, "", 0.0

    def tell(self, event: str, reason: str) -> None:
        """Logs it, unless it was logged a moment ago."""
        now = self._clock()
        if reason != self._last or now - self._at > _TOLD_S:
            self._last, self._at = reason, now
            log.info(event, reason=reason)
