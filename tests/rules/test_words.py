"""Words that the glossary abolishes are in no identifier, docstring, comment, message, metric or page."""

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.gateway.metrics import GatewayMetrics
from tests.rules.source_tree import ROOT, Module, defined_names, modules

GLOSSARY = ROOT / "docs" / "glossary.md"
PACKAGES = ("services", "kvtransfer")  # benchmarks have peers, which are other servers
_WIRE = "services/protocol/wire/"  # fields of messages are called as they are on the wire


@cache
def abolished() -> dict[str, str]:
    """What the glossary's last table lists: a word or phrase, and what Baton says instead."""
    _, _, table = GLOSSARY.read_text().partition("## Words that are gone")
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", table, flags=re.MULTILINE)[1:]
    return {word: instead for words, instead in rows for word in words.split(", ")}


def phrases_in(text: str) -> list[str]:
    """The abolished words of a text or of an identifier in any spelling."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).replace("_", " ").lower()
    return [word for word in abolished() if re.search(rf"\b{word}\b", apart)]


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_the_glossary_lists_them():
    assert len(abolished()) > 5
    assert phrases_in("HandoffId") == phrases_in("a handoff id") == ["handoff id"]
    assert phrases_in("the pool lets go of it") == ["lets go"]


def test_no_identifier_has_one():
    found = [
        f"{module.path}: {name} ({', '.join(abolished()[word] for word in words)})"
        for module in modules(*PACKAGES)
        for name in sorted(defined_names(module))
        if (words := phrases_in(name)) and not (module.path.startswith(_WIRE) and name == "incarnation")
    ]
    assert found == []


def test_no_docstring_or_comment_has_one():
    found = []
    for module in modules(*PACKAGES):
        texts = [*module.docstrings(), *_comments((ROOT / module.path).read_text())]
        found += [f"{module.path}:{line} {words}" for line, text in texts if (words := phrases_in(text))]
    assert found == []


def test_no_message_has_one():
    """Lines of the log with their values' names, errors, help: whatever the code has as text."""
    found = []
    for module in modules(*PACKAGES):
        texts = [*module.texts(), *module.logged_names()]
        found += [f"{module.path}:{line} {words}" for line, text in texts if (words := phrases_in(text))]
    assert found == []


def test_messages_are_read():
    """The pieces of an f-string too, and the names of what is logged; no docstring."""
    source = '''"""A peer."""\nlog.info(f"{a} of a peer", peer=1)\nraise E("no " "incarnation")\nx["incarnation"]'''
    module = Module.of("m.py", source)
    assert [phrases_in(text) for _, text in module.texts()] == [["incarnation"], ["peer"]]
    assert [name for _, name in module.logged_names()] == ["peer"]


def test_no_metric_has_one():
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    texts = [f"{metric.name} {metric.documentation}" for metric in registry.collect()]
    assert [text for text in texts if phrases_in(text)] == []


PAGES = sorted(
    page
    for folder in ("", "docs", "services", "kvtransfer")
    for page in ((ROOT / folder).rglob("*.md") if folder else ROOT.glob("*.md"))
    if page not in (GLOSSARY, ROOT / "CHANGELOG.md")  # both say what the words were
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_one(page: Path):
    text = re.sub(r"`[^`\n]*`", "", page.read_text())  # code may name a field of the wire
    lines = enumerate(text.splitlines(), 1)
    assert [f"{number}: {words}" for number, line in lines if (words := phrases_in(line))] == []
