"""Hooks of MkDocs: what a page is made of, and where its links lead.

Documents are written for the repository, where a link is the path of a file. On the site it leads to that file's page,
if it is one; to the repository (`extra.repository` in mkdocs.yml), if that has an address; else it is words alone.
A link to a file that is not there ends the build.
"""

import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Documents of other folders that are pages, by their place on the site.
OUTSIDE = {
    "run/chart.md": "helm/baton/README.md",
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
_ASSETS = {"assets/baton.css": "docs/site/baton.css"}
_README, _INDEX = "README.md", "index.md"  # the beginning, in the repository and on the site

_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<picture>!?)\[(?P<words>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_MASK = re.compile("\x00(\\d+)\x00")
_ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:|#")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Makes anchors of headings as the repository shows them, which links name."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def anchor(heading: str, separator: str) -> str:
    """Makes the anchor of a heading: letters in lower case, a separator for each space, no other signs."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds pages and files from outside of the folder of documents."""
    for place, path in {**OUTSIDE, **_ASSETS}.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to where they lead on the site. Raises PluginError for one that leads nowhere."""
    place = page.file.src_uri
    source = OUTSIDE.get(place, f"docs/{place}")
    repository = str(config.extra.get("repository") or "").rstrip("/")
    return rewritten(markdown, lambda link: lead(link, source, place, repository))


def rewritten(markdown: str, led: Callable[[str], str | None]) -> str:
    """Replaces the target of each link; one that is led to None becomes its words. Code stays as it is.

    In tables, where the repository needs `\\|` in code, MkDocs takes a bar for what it is.
    """
    kept: list[str] = []

    def mask(code: re.Match[str]) -> str:
        kept.append(code[0] if code[0].startswith("```") else code[0].replace("\\|", "|"))
        return f"\x00{len(kept) - 1}\x00"

    def replace(link: re.Match[str]) -> str:
        target = led(link["target"])
        return link["words"] if target is None else f"{link['picture']}[{link['words']}]({target})"

    masked = _LINK.sub(replace, _CODE.sub(mask, markdown))
    return _MASK.sub(lambda found: kept[int(found[1])], masked)


def lead(link: str, source: str, place: str, repository: str) -> str | None:
    """Returns where a link of a document leads on the site. Raises PluginError where it leads nowhere.

    source: the document's path in the repository; place: its page's. repository: the address of the repository's files,
    or "". None: there is nothing to lead to.
    """
    if _ELSEWHERE.match(link):
        return link
    path, hash_, heading = link.partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if target.startswith("..") or not (ROOT / target).exists():
        raise PluginError(f"{source} links to {link}, which is not there")
    if (found := place_of(target)) is not None:
        return posixpath.relpath(found, posixpath.dirname(place) or ".") + hash_ + heading
    return f"{repository}/{target}{hash_}{heading}" if repository else None


def place_of(path: str) -> str | None:
    """Returns where a file of the repository is on the site; None: it is not there."""
    pages: Mapping[str, str] = {source: place for place, source in OUTSIDE.items()} | {_README: _INDEX}
    if path in pages:
        return pages[path]
    beginning, _, rest = path.partition("/")
    return rest if beginning == "docs" and not rest.startswith("site/") and (ROOT / path).is_file() else None
