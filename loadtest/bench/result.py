"""The result of a run as a file: the fields of its report, and beside them what pages of several runs are made of."""

import dataclasses
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from loadtest.bench.plots import Plots
from loadtest.bench.report import Report
from loadtest.cannot_run import CannotRun

_FORMAT = 1
_LARGEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """One run of a search for the highest rate. rate: of requests, or of conversations of several, a second; None: all
    at once. keeps: enough requests kept the SLO.
    """

    rate: float | None
    keeps: bool
    report: Report


@dataclass(frozen=True, slots=True)
class Facts:
    """All that figures need beside them, in words: what was run, where, and on what."""

    command: str
    began: str  # time of day, UTC
    server: str
    model: str
    workload: str
    arrivals: str
    client: str  # its version and its processor


@dataclass(frozen=True, slots=True)
class Result:
    """A run. steps: of a search, whose best run `report` and `plots` are; else none."""

    label: str
    facts: Facts
    report: Report
    plots: Plots
    steps: list[Step]


def write_result(result: Result, file: Path) -> None:
    """Writes a result as JSON. The report's fields are those of the file, as `python -m loadtest client` has them."""
    plain = asdict(result)
    file.write_text(json.dumps({**plain.pop("report"), "format": _FORMAT, **plain}) + "\n")


def read_result(file: Path) -> Result:
    """Reads what `write_result` wrote. Raises CannotRun for any other file.

    A figure that an older one does not have is what the report says without it.
    """
    try:
        if file.stat().st_size > _LARGEST_BYTES:
            raise CannotRun(f"{file}: too large for a result of `baton bench`")
        data = json.loads(file.read_text())
        fields = {field.name: data[field.name] for field in dataclasses.fields(Report) if field.name in data}
        beside = {name: data[name] for name in ("label", "facts", "plots", "steps")}
        if data["format"] != _FORMAT:
            raise CannotRun(f"{file}: it is of another version of `baton bench`")
        return TypeAdapter(Result).validate_python({"report": fields, **beside})
    except (OSError, UnicodeDecodeError) as error:
        raise CannotRun(f"{file}: {error}") from error
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise CannotRun(f"{file}: it is no result of `baton bench --json`") from error
