"""The plan of a load: what is sent where, and when, made of settings that are checked before anything is asked."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.bench import access
from loadtest.bench.arrivals import arrivals
from loadtest.bench.drive import Pacing
from loadtest.bench.endpoints import Chat, Common, Completions, Endpoint
from loadtest.bench.script import Seed, Workload
from loadtest.bench.settings import EndpointName, Settings
from loadtest.bench.slo import Slo, read_slo
from loadtest.bench.workloads.chosen import Chosen, choose
from loadtest.bench.workloads.conversations import Conversations
from loadtest.bench.workloads.sharegpt import ShareGpt
from loadtest.bench.workloads.trace import Trace
from loadtest.cannot_run import CannotRun
from loadtest.http_stream import Address

_OF_ARRIVALS = 7  # among the streams of random numbers of a seed
_OF_SEARCH = ("steps", "step_seconds", "attainment")


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a load but its model, which the server may have to name. admin: of a Baton, for its counters."""

    settings: Settings
    address: Address
    admin: Address | None
    chosen: Chosen
    slo: Slo | None
    extra: Mapping[str, Any]

    @property
    def workload(self) -> Workload:
        """The requests that are measured."""
        return self.chosen.workload

    @property
    def unit(self) -> str:
        """Returns the word for one script in reports: it is sent at a rate, and has a place of --concurrency."""
        workload = self.workload
        of_turns = isinstance(workload, Conversations | ShareGpt) and workload.turns > 1
        return "conversations" if of_turns else "requests"

    @property
    def is_valid(self) -> Callable[[str], bool] | None:
        """The check of answers that are to have a form."""
        return is_json if self.chosen.is_json else None

    def endpoint(self, model: str) -> Endpoint:
        """The endpoint, for requests to this model."""
        ignore_eos = not self.settings.stop_at_eos and not self.chosen.is_json
        common = Common(model, self.settings.temperature, ignore_eos, self.extra)
        return Chat(common) if self.chosen.endpoint is EndpointName.CHAT else Completions(common)

    def pacing(self) -> Pacing:
        """The times of one run."""
        settings = self.settings
        seed = settings.seed
        by_file = isinstance(self.workload, Trace) and settings.rate is None and settings.concurrency is None
        return Pacing(
            concurrency=settings.concurrency,
            arrivals=None if settings.rate is None else self.arrivals(settings.rate, self.workload.num_scripts, seed),
            keeps_times=by_file,
            seconds=settings.seconds,
            timeout_s=settings.timeout,
        )

    def arrivals(self, rate: float, number: int | None, seed: Seed) -> Iterator[float]:
        """Times of scripts at a rate, with the burstiness of the settings."""
        random = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_OF_ARRIVALS,)))
        return arrivals(rate, self.settings.burstiness or 1.0, number, random)

    def pacing_words(self) -> str:
        """The arrivals in a few words, for reports."""
        settings = self.settings
        if settings.find_rate:
            return f"the highest rate that keeps {self.slo}"
        bursts = "" if settings.burstiness is None else f", burstiness {settings.burstiness:g}"
        at_most = "" if settings.concurrency is None else f", at most {settings.concurrency} at a time"
        if settings.rate is not None:
            return f"{settings.rate:g} {self.unit}/s{bursts}{at_most}"
        if settings.concurrency is not None:
            return f"{settings.concurrency} at a time"
        return "the trace's times" if isinstance(self.workload, Trace) else "all at once"


def make_plan(settings: Settings) -> Plan:
    """Checks the settings. Raises CannotRun for those that contradict each other, and for files that cannot be used."""
    _check_arrivals(settings)
    address = access.address(settings.url, settings.api_key, settings.ca)
    admin = None if settings.admin_url is None else access.admin_address(settings.admin_url, settings.ca)
    slo = None if settings.slo is None else read_slo(settings.slo)
    for file, flag in ((settings.json, "--json"), (settings.report, "--report")):
        if file is not None and not (file.parent.is_dir() and os.access(file.parent, os.W_OK)):
            raise CannotRun(f"{flag} {file}: there is no folder {file.parent}, or nothing may be written to it")
    return Plan(settings, address, admin, choose(settings), slo, _object(settings.extra_body))


def _check_arrivals(settings: Settings) -> None:
    if settings.burstiness is not None and settings.rate is None and not settings.find_rate:
        raise CannotRun("--burstiness is of --rate, or of --find-rate")
    if settings.find_rate:
        _check_search(settings)
        return
    if given := [name for name in _OF_SEARCH if getattr(settings, name) is not None]:
        raise CannotRun(f"--{given[0].replace('_', '-')} is of --find-rate")
    if settings.speed is not None and (settings.rate is not None or settings.concurrency is not None):
        raise CannotRun("--speed is of a trace's own times, in whose place --rate and --concurrency put others")
    bounds = settings.requests, settings.rate, settings.concurrency, settings.trace
    if settings.seconds is not None and not any(bound is not None for bound in bounds):
        raise CannotRun("--seconds alone is no bound of requests at once: say --rate, --concurrency or --requests too")


def _check_search(settings: Settings) -> None:
    if settings.slo is None:
        raise CannotRun("--find-rate looks for the highest rate that keeps --slo: say one, as ttft=500ms,itl=50ms")
    for name in ("requests", "seconds", "members", "concurrency", "trace"):
        if getattr(settings, name) is not None:
            raise CannotRun(f"--{name} is not for --find-rate, whose runs are as long as --step-seconds and --rate say")


def _object(text: str | None) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CannotRun(f"--extra-body {text}: {error}") from error
    if not isinstance(value, dict):
        raise CannotRun(f'--extra-body {text}: a JSON object is as {{"top_p": 0.9}}')
    return value


def is_json(text: str) -> bool:
    """Says whether a text is whole JSON, or several values of it as several calls of tools have them.

    One that is nested deeper than Python's parser goes counts as none.
    """
    decoder, at, text = json.JSONDecoder(), 0, text.strip()
    while at < len(text):
        try:
            _, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return False
        at += len(text[at:]) - len(text[at:].lstrip())
    return bool(text)
