"""Makes the page: figures and facts as HTML, points as JSON, plotly's script out of its package.

Nothing in it comes from prompts or answers, nor from the texts of errors, which may repeat prompts. All texts are
escaped; the page's policy lets its own scripts run, by their digests, and nothing else.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from loadtest.bench.html.rows import figure_rows, headlines, warnings
from loadtest.bench.report import Report
from loadtest.bench.result import Result
from loadtest.bench.slo import ATTAINMENT
from loadtest.cannot_run import CannotRun

_HERE = Path(__file__).parent
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)


def check_plotly() -> None:
    """Raises CannotRun where plotly is not installed."""
    if find_spec("plotly") is None:
        raise CannotRun("--report needs plotly: pip install 'baton-serve[console]', or plotly")


def write_page(results: Sequence[Result], file: Path) -> None:
    """Writes the page of some results. Raises OSError."""
    file.write_text(page(results), encoding="utf-8")


def page(results: Sequence[Result]) -> str:
    """Makes the page of some results."""
    scripts = [_plotly(), (_HERE / "report.js").read_text()]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    runs = [
        {
            "result": result,
            "headlines": headlines(result.report),
            "warnings": warnings(result.report),
        }
        for result in results
    ]
    return environment.get_template("report.html.jinja").render(
        policy=_POLICY.format(scripts=" ".join(f"'sha256-{digest}'" for digest in digests)),
        title=" · ".join(dict.fromkeys(result.label for result in results)),
        style=Markup((_HERE / "report.css").read_text()),
        scripts=[Markup(script) for script in scripts],
        runs=runs,
        rows=figure_rows(results),
        points=[_points(result) for result in results],
    )


def _plotly() -> str:
    """The script of plotly, as its package has it. Raises CannotRun where it could not be put into a page."""
    from plotly.offline import get_plotlyjs

    script = str(get_plotlyjs())
    if "</script" in script.lower():
        raise CannotRun("the script of this version of plotly cannot be put into a page")
    return script


def _points(result: Result) -> dict[str, Any]:
    """The points of a run's plots. Names are escaped: plotly takes some HTML in them."""
    own: tuple[float | None, bool | None, Report] = (None, _keeps(result.report), result.report)
    steps: list[tuple[float | None, bool | None, Report]] = [
        (step.rate, step.keeps, step.report) for step in result.steps
    ]
    runs = steps or [own]
    return {
        "label": str(escape(result.label)),
        **asdict(result.plots),
        "runs": [_run_point(rate, keeps, asdict(report)) for rate, keeps, report in runs if report.requests_per_s],
    }


def _keeps(report: Report) -> bool | None:
    """Returns True if enough requests of a run kept its SLO; None where it had none."""
    return None if report.goodput is None else report.goodput.share >= ATTAINMENT


def _run_point(rate: float | None, keeps: bool | None, report: dict[str, Any]) -> dict[str, Any]:
    figures = ("requests_per_s", "output_tokens_per_s", "ttft_ms", "itl_ms")
    return {"rate": rate, "keeps": keeps, **{figure: report[figure] for figure in figures}}
