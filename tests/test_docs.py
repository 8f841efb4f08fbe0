"""The documents: their links lead somewhere, and their tables say what the code says."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from kvtransfer.messages import EndReason
from services.engine.sequences.admission import Admission
from services.gateway.anthropic_api.errors import MessagesEnvelope
from services.gateway.api.errors import from_generation_error
from services.gateway.api.generation import GenerationError, Refusal, Unsupported
from services.gateway.dispatch.ledger.attempt import HandoffOutcome
from services.gateway.dispatch.router import NoPlan
from services.gateway.grpc_api.servicer import CODE_OF_STATUS
from services.gateway.metrics import GatewayMetrics, ProcessMetrics, RefusedWorkers
from services.prefix_index.malformed import MalformedEntries
from services.process.gc_watch import GcWatch
from services.process.log_writer import LogWriter
from services.protocol.outcomes import FailureCode, FinishReason
from services.protocol.versions import Since

ROOT = Path(__file__).parent.parent
IGNORED = {"build", "dist"}
API, REFERENCE, PROTOCOL = ROOT / "docs/api.md", ROOT / "docs/reference.md", ROOT / "docs/protocol.md"
ENDS = ROOT / "docs/ends.md"
MAX_README_LINES = 165

_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def documents(folder: Path = ROOT) -> Iterator[Path]:
    """The *.md files in a folder and below it, but for those that git ignores."""
    yield from sorted(folder.glob("*.md"))
    for below in sorted(folder.iterdir()):
        if below.is_dir() and below.name[0] != "." and below.name not in IGNORED:
            yield from documents(below)


def links(text: str) -> list[str]:
    """The targets of a document's links, those in code left out."""
    return _LINK.findall(_CODE.sub("`code`", _FENCED.sub("", text)))


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCED.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        number = next(number for number in range(len(found) + 1) if _numbered(slug, number) not in found)
        found.add(_numbered(slug, number))
    return found


def _numbered(slug: str, number: int) -> str:
    return f"{slug}-{number}" if number else slug


def broken_links(document: Path) -> list[str]:
    """Relative links of a document that lead to no file, or to no heading of the file."""
    broken = []
    for link in links(document.read_text()):
        if re.match(r"[a-z][a-z+.-]*:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken


def rows(document: Path, heading: str) -> Iterator[list[str]]:
    """The cells of the first table below a heading, without its two first lines."""
    _, found, rest = document.read_text().partition(f"\n{heading}\n")
    assert found, f"{document.name} has no heading {heading!r}"
    lines = iter(rest.splitlines())
    table = [next(line for line in lines if line.startswith("|"))]
    for line in lines:
        if not line.startswith("|"):
            break
        table.append(line)
    for line in table[2:]:
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@pytest.mark.parametrize("document", list(documents()), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    assert broken_links(document) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    """Also one to a heading; what stands in code is no link."""
    (tmp_path / "other.md").write_text("# One `b` [c](d.md)\n## Same\n## Same\n```\n# Not one\n```\n")
    fine = "[a](other.md) [b](other.md#one-b-c) [c](other.md#same-1) [d](#here) [e](https://x.org) `[f](no.md)`"
    document = tmp_path / "document.md"
    document.write_text(f"# Here\n{fine}\n[g](no.md) [h](other.md#not-one) [i](#there)\n```\n[j](no.md)\n```\n")
    assert broken_links(document) == ["no.md", "other.md#not-one", "#there"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


class Described(NamedTuple):
    """A metric as Prometheus shows it."""

    name: str
    kind: str
    labels: frozenset[str]


def registered_metrics() -> set[Described]:
    """All metrics of a gateway, whether or not they have a sample yet."""
    registry = CollectorRegistry()
    metrics, watch = GatewayMetrics(registry), GcWatch()
    metrics.show_limits(lambda: 1, lambda: False)
    metrics.registry.register(RefusedWorkers(dict))
    watch.close()
    process_metrics = ProcessMetrics(metrics.registry, watch, MalformedEntries(), LogWriter(io.StringIO(), str))
    process_metrics.show_followed({"keys": lambda: 0.0})
    found = set()
    for collector in registry._collector_to_names:
        for family in collector.collect():
            # A family that its collector made has its labels itself, a plain metric's are its collector's.
            labels = collector._labelnames if isinstance(collector, MetricWrapperBase) else family._labelnames  # type: ignore[attr-defined]
            suffix = "_total" if family.type == "counter" else ""
            found.add(Described(family.name + suffix, family.type, frozenset(labels)))
    return found


def test_the_table_of_metrics_has_those_that_the_gateway_registers() -> None:
    """Names, types and labels; the number of lines too, so that none is there twice."""
    table = list(rows(REFERENCE, "## Metrics"))
    described = {
        Described(name.strip("`"), kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in table
    }
    assert described == registered_metrics()
    assert len(described) == len(table)


@pytest.mark.parametrize(
    ("heading", "kind"),
    [("## Why a handoff ends", EndReason), ("## Failure codes", FailureCode), ("## Versions", Since)],
)
def test_the_tables_of_the_protocol_have_the_names_and_numbers_of_the_wire(
    heading: str, kind: type[EndReason] | type[FailureCode] | type[Since]
) -> None:
    assert [cells[0] for cells in rows(PROTOCOL, heading)] == [f"`{each.name}` ({each.value})" for each in kind]


def named(cell: str) -> list[str]:
    """What a cell has between backquotes."""
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("How a complete answer ends", [each.name for each in FinishReason]),
        ("Why a request is refused", [each.value for each in Refusal]),
        ("Why there is no plan", [each.name for each in NoPlan]),
        ("Why a worker failed an attempt", [each.name for each in FailureCode]),
        ("Why a worker does not begin a request", [each.name for each in Admission]),
        ("Why a handoff ended", [each.name for each in EndReason]),
        ("How an attempt on a pair ended", [each.value for each in HandoffOutcome]),
    ],
)
def test_the_map_of_ends_has_every_reason(heading: str, names: list[str]) -> None:
    assert sorted(name for cells in rows(ENDS, f"## {heading}") for name in named(cells[0])) == sorted(names)


def errors_below(kind: type[GenerationError]) -> Iterator[type[GenerationError]]:
    for below in kind.__subclasses__():
        yield below
        yield from errors_below(below)


def test_the_map_of_ends_has_every_error_with_what_each_api_sends_for_it() -> None:
    """Statuses over HTTP and in the Messages API, and gRPC's code."""
    sent = {}
    for kind in errors_below(GenerationError):
        made = Unsupported("", restricted=False) if kind is Unsupported else kind("")
        error = from_generation_error(made, "")
        code = CODE_OF_STATUS.get(error.status, grpc.StatusCode.INTERNAL)
        sent[kind.__name__] = (str(error.status), str(MessagesEnvelope().status(error)), f"`{code.name}`")
    table = list(rows(ENDS, "## What the client is sent"))
    assert {named(name)[0]: (http, messages, code) for name, _, http, messages, code in table} == sent
    assert len(table) == len(sent)


_PATH = re.compile(r"`((?:services|kvtransfer|loadtest|tests|protos|docs|helm)/[\w./-]*)`")


@pytest.mark.parametrize("document", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_every_path_that_a_document_names_is_there(document: Path) -> None:
    """A folder, a file, or a module without its ending."""
    named = _PATH.findall(document.read_text())
    assert [path for path in named if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()] == []
