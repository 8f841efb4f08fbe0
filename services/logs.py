"""Log lines of every process: one event each, readable text or one JSON object, on stderr.

Libraries that log through the standard library come out in the same form. Whatever is bound in structlog's context
variables, a request's id above all, is on every line that is written while it is bound.
"""

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import Processor

from services.config import LogFormat


def configure_logging(log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Called once, by a process's entry point. Lines go to `stream`, by default stderr."""
    target = sys.stderr if stream is None else stream
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    render = _renderer(log_format, target)
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(target),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _renderer(log_format: LogFormat, target: TextIO) -> list[Processor]:
    match log_format:
        case LogFormat.JSON:
            return [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
        case LogFormat.TEXT:
            plain = structlog.dev.plain_traceback
            return [structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=plain)]
