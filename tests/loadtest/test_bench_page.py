"""The page: what is in it and what is not, and that a browser draws it."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from loadtest.bench.command import report as write_report
from loadtest.bench.html.page import page
from loadtest.bench.html.rows import figure_rows, headlines, warnings
from loadtest.bench.outcome import Failure, Outcome
from loadtest.bench.outcomes import Gaps, Outcomes
from loadtest.bench.own_delay import OwnDelay
from loadtest.bench.plots import plots
from loadtest.bench.report import report
from loadtest.bench.result import Facts, Result, Step, read_result, write_result
from loadtest.bench.slo import read_slo
from loadtest.cannot_run import CannotRun
from tests.machine import CHROMIUM, needs

NASTY = "</script><img src=x onerror=alert(1)> & \"quoted\" 'too'"
FACTS = Facts(
    command=f"baton bench --label '{NASTY}'",
    began="2026-11-26 12:00:00 UTC",
    server="127.0.0.1:8000, somebody 1.2.3",
    model=NASTY,
    workload="48 / 128 tokens",
    arrivals="all at once",
    client="baton 0.1.0 on a processor",
)


def outcomes(requests: int, scale: float, seed: int = 0) -> Outcomes:
    """Answers of 20 tokens, some of them slow, and one refusal whose text repeats a prompt."""
    random, found = np.random.default_rng(seed), Outcomes()
    for number in range(requests):
        sent_s = number * 0.05
        gaps = random.lognormal(np.log(0.02 * scale), 0.3, 20)
        parts = (sent_s + random.lognormal(np.log(0.1 * scale), 0.5) + np.cumsum(gaps)).tolist()
        found.add(Outcome(sent_s=sent_s, due_s=sent_s - 0.001, parts_s=parts, output_tokens=20, input_tokens=48))
    found.add(Outcome(sent_s=0.5, parts_s=[0.6], failure=Failure("status 400", "status 400: my secret prompt", 400)))
    return found


def result(label: str = "one", requests: int = 100, scale: float = 1.0) -> Result:
    found = outcomes(requests, scale)
    delay = OwnDelay(np.array([0.001, 0.002]), cpu_s=4.0, seconds=5.0)  # type: ignore[arg-type]
    summed = report(found, slo=read_slo("ttft=200ms,itl=50ms"), delay=delay)
    return Result(label, FACTS, summed, plots(found), [])


def searched(label: str = "a search") -> Result:
    steps = [Step(rate, rate < 20, result(requests=20, scale=rate / 10).report) for rate in (5.0, 10.0, 20.0)]
    return replace(result(label), steps=steps)


class Elements(HTMLParser):
    """The elements of a page, with their attributes, and the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        self.tags.append((f"/{tag}", {}))


@pytest.fixture(scope="module")
def elements() -> Elements:
    return Elements(page([result(NASTY), searched()]))


def test_texts_of_others_are_text_in_the_page(elements: Elements) -> None:
    assert not any(tag in ("img", "link", "iframe", "object", "base", "form") for tag, _ in elements.tags)
    assert not any(name.startswith("on") for _, attributes in elements.tags for name in attributes)
    points = json.loads(elements.scripts[1])
    assert points[0]["label"].startswith("&lt;/script&gt;&lt;img")  # plotly takes some HTML in names


def test_the_page_runs_its_own_scripts_and_loads_nothing(elements: Elements) -> None:
    policies = [attributes for tag, attributes in elements.tags if attributes.get("http-equiv")]
    policy = str(policies[0]["content"])
    assert "default-src 'none'" in policy
    own = [elements.scripts[0], elements.scripts[2]]
    digests = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in own}
    assert set(re.findall(r"sha256-([^']+)'", policy)) == digests
    scripts = [attributes for tag, attributes in elements.tags if tag == "script"]
    assert len(scripts) == 3
    assert not any("src" in attributes for attributes in scripts)


def test_neither_prompts_nor_texts_of_errors_are_in_it() -> None:
    text = page([result()])
    assert "secret prompt" not in text
    assert "1 × status 400" in text


def test_the_table_has_the_figures_that_any_run_has() -> None:
    rows = {(row.name, row.unit): row.cells for row in figure_rows([result(), replace(result(), steps=[])])}
    assert rows[("requests", "")] == ("101", "101")
    assert rows[("tokens", "of answers")] == ("2,000", "2,000")
    assert rows[("the client", "of a core")] == ("80%", "80%")
    assert not any(name == "KV moved" for name, _ in rows)


def test_what_a_reader_has_to_know_is_above_the_plots() -> None:
    assert warnings(result().report) == [
        "The client or its machine limited this run: it used 80% of a core, and has no second one.",
        "1 × status 400",
    ]
    assert [name for name, _, _ in headlines(result().report)][-1] == "goodput"


def test_a_sample_of_gaps_is_called_one_and_counted_as_what_it_stands_for() -> None:
    found, parts = Outcomes(), np.arange(101.0)
    found.gaps = Gaps(limit=1000)
    for _ in range(100):
        found.add(Outcome(parts_s=parts.tolist(), output_tokens=101))
    assert found.gaps.share < 0.2
    assert warnings(report(found))[-1].startswith(f"Percentiles of ITL are of {found.gaps.share:.1%} of all times")
    gap_map = plots(found).gap_map
    assert gap_map is not None
    assert np.sum(gap_map.counts) == pytest.approx(10_000, rel=0.15)


def test_a_run_is_drawn_by_its_slo_where_it_has_one() -> None:
    """Enough requests keep it, or too few; without a goodput there is none to be kept."""
    kept, missed, none = (
        replace(result(), report=report(outcomes(requests=20, scale=1), slo=slo))
        for slo in (read_slo("ttft=60s"), read_slo("ttft=1ms"), None)
    )
    kept = replace(kept, report=replace(kept.report, goodput=replace(kept.report.goodput, share=0.99)))  # type: ignore[type-var]
    points = json.loads(Elements(page([kept, missed, none])).scripts[1])
    assert [run["runs"][0]["keeps"] for run in points] == [True, False, None]


def test_a_result_without_a_newer_figure_is_read(tmp_path: Path) -> None:
    write_result(result(), file := tmp_path / "r.json")
    fields = json.loads(file.read_text())
    del fields["unsent"]
    file.write_text(json.dumps(fields))
    assert read_result(file) == result()


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    for number, each in enumerate((result(), searched())):
        write_result(each, file := tmp_path / f"{number}.json")
        assert read_result(file) == each
        assert json.loads(file.read_text())["ttft_ms"]["p50"] == each.report.ttft_ms.p50  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"requests": 5}', "\udcff"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "r.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CannotRun, match=r"r\.json"):
        read_result(file)


def test_a_result_of_another_version_is_named(tmp_path: Path) -> None:
    write_result(result(), file := tmp_path / "r.json")
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CannotRun, match="of another version"):
        read_result(file)


def test_without_plotly_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(CannotRun, match=r"pip install 'baton-serve\[console\]'"):
        write_report([tmp_path / "none.json"], tmp_path / "page.html")


@pytest.mark.long
@needs(CHROMIUM)
def test_a_browser_draws_every_plot_without_a_complaint(tmp_path: Path) -> None:
    """Nine plots of two runs, each with axes; nothing is refused by the page's policy."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, each in zip(files, (result(NASTY), searched()), strict=True):
        write_result(each, file)
    assert write_report(files, tmp_path / "page.html") == 0
    shown = subprocess.run(
        [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=10000",
            "--dump-dom",
            (tmp_path / "page.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert [line for line in shown.stderr.splitlines() if "CONSOLE" in line] == []
    assert len(re.findall(r'data-plot="[^"]+"', shown.stdout)) == 9
    assert len(re.findall(r'class="plot [^"]*js-plotly-plot"', shown.stdout)) == 9
    assert "<p>There is nothing to draw.</p></div>" not in shown.stdout
    assert shown.stdout.count('class="xtick"') > 9
