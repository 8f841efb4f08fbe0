"""Log lines: one event each, with the request's id, in the form that was asked for."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from services.config import LogFormat
from services.process.logs import configure_logging


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging is the process's, not a test's."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = before


def log_both_ways(log_format: LogFormat) -> list[str]:
    stream = io.StringIO()
    writer = configure_logging(log_format, stream)
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        structlog.get_logger().info("handed over", blocks=3)
        logging.getLogger("library").warning("something %s", "odd")
    structlog.get_logger().debug("not worth a line")
    writer.close()
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("log_format", LogFormat)
def test_a_traceback_has_no_values_of_variables(log_format: LogFormat):
    stream = io.StringIO()
    writer = configure_logging(log_format, stream)
    secret = "".join(["sec", "ret"])
    try:
        raise ValueError(len(secret))
    except ValueError:
        structlog.get_logger().exception("a defect")
    writer.close()
    assert "ValueError" in stream.getvalue()
    assert "secret" not in stream.getvalue().replace("len(secret)", "")


def test_json_is_one_object_a_line():
    ours, library = map(json.loads, log_both_ways(LogFormat.JSON))
    assert {key: ours[key] for key in ("event", "level", "blocks", "request_id")} == {
        "event": "handed over",
        "level": "info",
        "blocks": 3,
        "request_id": "r1",
    }
    assert ours["timestamp"].endswith("Z")
    assert (library["event"], library["level"], library["logger"]) == ("something odd", "warning", "library")
    assert library["request_id"] == "r1"


def test_text_reads_well():
    ours, library = log_both_ways(LogFormat.TEXT)
    assert "handed over" in ours
    assert "blocks=3" in ours
    assert "request_id=r1" in library
    assert "\x1b" not in ours  # not a terminal


def test_text_quotes_what_could_be_taken_for_something_else():
    stream = io.StringIO()
    writer = configure_logging(LogFormat.TEXT, stream)
    structlog.get_logger().info("said", reason="two words", forged="a\n2026 [error] b", colour="\x1b[31m", none=None)
    writer.close()
    (line,) = stream.getvalue().splitlines()
    assert "reason='two words'" in line
    assert "none=None" in line
    assert "\\n2026" in line
    assert "\x1b" not in line


@pytest.mark.parametrize("log_format", LogFormat)
def test_exceptions_come_with_their_traceback(log_format: LogFormat):
    stream = io.StringIO()
    writer = configure_logging(log_format, stream)
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("failed")
    writer.close()
    text = stream.getvalue()
    assert "ValueError" in text
    assert "broken" in text
    assert len(text.splitlines()) == 1 or log_format is LogFormat.TEXT
