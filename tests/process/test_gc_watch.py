"""Garbage collections, counted and logged."""

import gc
import io
import json
import time
from collections.abc import Iterator

import pytest

from services.config import LogFormat
from services.config.option import Refusal
from services.process.configs import parse_gc_debug
from services.process.gc_watch import GcWatch
from services.process.logs import configure_logging


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Where log lines go."""
    stream = io.StringIO()
    configure_logging(LogFormat.JSON, stream)
    yield stream
    configure_logging(LogFormat.TEXT)


def lines_about(log: io.StringIO, generation: int) -> list[dict[str, object]]:
    """Those of one generation's collections, when there is one; another thread writes them."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        lines = [json.loads(line) for line in log.getvalue().splitlines()]
        if found := [line for line in lines if line["generation"] == generation]:
            return found
        time.sleep(0.01)
    raise AssertionError("nothing is logged")


def collect_knots(watch: GcWatch, number: int) -> None:
    try:
        knots = [Knot() for _ in range(number)]
        del knots
        gc.collect()
    finally:
        watch.close()


def test_collections_and_their_pauses_are_counted_until_the_watch_ends(log: io.StringIO) -> None:
    watch = GcWatch()
    collect_knots(watch, 10)
    counted = watch.num_collections
    assert counted >= 1
    assert watch.pause_s > 0
    gc.collect()
    assert watch.num_collections == counted
    assert log.getvalue() == ""


def test_a_line_has_generation_pause_and_what_was_collected(log: io.StringIO) -> None:
    collect_knots(GcWatch(0), 10)
    line = lines_about(log, 2)[-1]
    assert line["event"] == "garbage collection"
    assert isinstance(line["collected"], int)
    assert line["collected"] >= 10
    assert isinstance(line["pause_ms"], float)
    assert "types" not in line


@pytest.mark.long
def test_with_types_a_line_names_the_most_common(log: io.StringIO) -> None:
    gc.collect()
    gc.freeze()
    collect_knots(GcWatch(3), 50_000)
    gc.unfreeze()
    types = lines_about(log, 2)[-1]["types"]
    assert isinstance(types, dict)
    assert len(types) == 3
    assert types[f"{Knot.__module__}.Knot"] >= 50_000


@pytest.mark.parametrize(("text", "types"), [("off", None), ("", None), ("on", 0), ("top=5", 5), (" TOP=12 ", 12)])
def test_the_environment_says_how_much_is_logged(text: str, types: int | None) -> None:
    assert parse_gc_debug(text) == types


@pytest.mark.parametrize("text", ["1", "yes", "top", "top=", "top=0", "top=-1", "top=x"])
def test_what_it_cannot_mean_is_refused(text: str) -> None:
    with pytest.raises(Refusal, match=r"BATON_GC_DEBUG is '.*'; it is off, on, or top=N"):
        parse_gc_debug(text)
