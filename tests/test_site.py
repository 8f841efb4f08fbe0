"""The site of the documents: each has its place, and links lead where they lead in the repository."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mkdocs.exceptions import PluginError

from docs.site.pages import OUTSIDE, ROOT, anchor, lead, place_of, rewritten
from tests.test_docs import anchors

DOCS = ROOT / "docs"


class _Loader(yaml.SafeLoader):
    """Reads the tag of MkDocs for variables in the environment: as the default that is named beside."""


def _default(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> Any:
    return loader.construct_sequence(node)[-1]


_Loader.add_constructor("!ENV", _default)


def navigation(entries: list[Any]) -> Iterator[str]:
    """The pages in their order."""
    for entry in entries:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else navigation(value)


def test_the_navigation_names_each_document_once():
    pages = list(navigation(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]))
    documents = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.parent != DOCS / "site"}
    assert sorted(pages) == sorted(documents | OUTSIDE.keys())


@pytest.mark.parametrize(
    ("source", "place", "link", "leads"),
    [
        ("docs/run/tls.md", "run/tls.md", "keys.md#limits", "keys.md#limits"),
        ("docs/run/tls.md", "run/tls.md", "../../SECURITY.md#nixl", "../security.md#nixl"),
        ("docs/start.md", "start.md", "../README.md", "index.md"),
        ("docs/start.md", "start.md", "../helm/baton/README.md", "run/chart.md"),
        ("helm/baton/README.md", "run/chart.md", "../../docs/run/alerts.md", "alerts.md"),
        ("CHANGELOG.md", "changelog.md", "docs/api.md#clients", "api.md#clients"),
        ("docs/architecture.md", "architecture.md", "pictures/worker.svg", "pictures/worker.svg"),
        ("docs/api.md", "api.md", "#embeddings", "#embeddings"),
        ("docs/api.md", "api.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_a_link_leads_to_the_page_of_its_file(source: str, place: str, link: str, leads: str):
    assert lead(link, source, place, "") == leads


def test_a_link_to_code_leads_to_the_repository_or_is_its_words():
    link = "../services/tls/README.md"
    assert lead(link, "docs/api.md", "api.md", "") is None
    assert (
        lead(link, "docs/api.md", "api.md", "https://h/p/blob/main") == "https://h/p/blob/main/services/tls/README.md"
    )
    assert place_of("docs/site/README.md") is None
    for nowhere in ("no-such.md", "../services/no-such.py", "../../outside.md"):
        with pytest.raises(PluginError, match="which is not there"):
            lead(nowhere, "docs/api.md", "api.md", "")


def test_code_is_not_touched_and_bars_of_tables_are_bars():
    text = "[`a`](x) `[b](x)`\n\n```\n[c](x) a\\|b\n```\n\n| `d\\|e` | ![f](x) |\n"
    assert rewritten(text, lambda _: "y") == "[`a`](y) `[b](x)`\n\n```\n[c](x) a\\|b\n```\n\n| `d|e` | ![f](y) |\n"
    assert rewritten(text, lambda _: None).startswith("`a` `[b](x)`")


@pytest.mark.parametrize("document", sorted(DOCS.rglob("*.md")), ids=lambda path: path.name)
def test_anchors_are_those_of_the_repository(document: Path):
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = [
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each) for each in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    ]
    assert {anchor(heading.replace("`", ""), "-") for heading in headings} == anchors(document.read_text())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.long
def test_the_site_is_built_without_a_warning_and_asks_no_other_host(site: Path):
    """Links to headings are looked at too. What a page loads is a script, a style, a picture or a font."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*?\bsrc=\"([^\"]*)\"", text)
        loaded += re.findall(r"<link\b(?![^>]*rel=\"canonical\")[^>]*?\bhref=\"([^\"]*)\"", text)
        assert loaded
        assert [each for each in loaded if re.match(r"(https?:)?//", each)] == []
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"url\(\s*['\"]?(?:https?:)?//[^)]*", styles) == []


@pytest.mark.long
def test_the_site_can_be_searched(site: Path):
    index = (site / "search" / "search_index.json").read_text()
    assert "BatonBlocksQuarantined" in index
    assert "baton top" in index
