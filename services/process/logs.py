"""Log lines of every process: one event each, readable text or one JSON object, on stderr.

Libraries that log through the standard library come out in the same form. Whatever is bound in structlog's context
variables, a request's id above all, is on every line that is written while it is bound.
"""

import logging
import re
import sys
from typing import Any, TextIO

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor, WrappedLogger

from services.config import LogFormat
from services.process.log_writer import LogWriter
from services.process.terminal import has_colours, width
from services.process.wrapping import wrap

_BARE = re.compile(r"[^\s\"'=\x00-\x1f\x7f]+")  # a text that needs no quotes
_EVENT_WIDTH = 30
_INDENT = 4  # of what is left of a line on a terminal
_TRACEBACKS = ExceptionDictTransformer(show_locals=False)  # they may be keys and prompts


class _Lines:
    """A logger of structlog's that hands its lines to a writer."""

    def __init__(self, writer: LogWriter) -> None:
        self.msg = writer.put

    debug = info = warning = error = critical = exception = property(lambda self: self.msg)


class _Handler(logging.Handler):
    """Hands the lines of the standard library's loggers to a writer."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        try:
            line = self.format(record)
        except Exception as error:  # of an argument's own code
            line = f"a log line of {record.name} cannot be written: {type(error).__name__}"
        self._writer.put(line)


def configure_logging(log_format: LogFormat, stream: TextIO | None = None) -> LogWriter:
    """Sets up the log of this process, once, at its start. Lines go to `stream`, by default stderr.

    Whoever logs never waits for the stream, and never fails with it.
    """
    target = sys.stderr if stream is None else stream
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    render = _renderer(log_format, target)

    def describe_drops(count: int) -> str:
        event: Any = {"event": "log lines dropped", "lines": count}
        for process in (*shared, *render):
            event = process(None, "warning", event)
        return str(event)

    writer = LogWriter(target, describe_drops)
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: _Lines(writer),
        cache_logger_on_first_use=False,
    )
    handler = _Handler(writer)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    return writer


def _renderer(log_format: LogFormat, target: TextIO) -> list[Processor]:
    match log_format:
        case LogFormat.JSON:
            return [structlog.processors.ExceptionRenderer(_TRACEBACKS), structlog.processors.JSONRenderer()]
        case LogFormat.TEXT if target.isatty():
            plain = structlog.dev.plain_traceback
            console = structlog.dev.ConsoleRenderer(colors=has_colours(target), exception_formatter=plain)
            return [console, _wrapping(target)]
        case LogFormat.TEXT:
            return [structlog.processors.format_exc_info, _to_text]


def _wrapping(terminal: TextIO) -> Processor:
    """Breaks the first line of an event at words, to the terminal's width then; tracebacks stay as they are."""

    def wrapped(logger: WrappedLogger, method: str, text: Any) -> str:
        first, newline, rest = str(text).partition("\n")
        return wrap(first, width(terminal), _INDENT) + newline + rest

    return wrapped


def _to_text(logger: WrappedLogger, method: str, event: EventDict) -> str:
    """The line that ConsoleRenderer writes without colours, at a quarter of its cost, which every request pays."""
    when, level, what = event.pop("timestamp"), event.pop("level"), event.pop("event")
    details = [event.pop(name) for name in ("stack", "exception") if name in event]
    line = f"{when} [{level:<9}] {what:<{_EVENT_WIDTH}} " + " ".join(
        [f"{key}={_shown(event[key])}" for key in sorted(event)]
    )
    return "\n".join([line.rstrip(), *details])


def _shown(value: object) -> str:
    return value if isinstance(value, str) and _BARE.fullmatch(value) else repr(value)
