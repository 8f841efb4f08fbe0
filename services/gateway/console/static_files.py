"""The console's pages: files of this package, and plotly out of its own where that is installed.
They ask no other server.

The files are read once. plotly.min.js, which has megabytes, is read when it is asked for, and the browser keeps it.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

PLOTLY = "plotly.min.js"
INSTALL = "pip install 'baton-serve[console]'"
# plotly's heat maps are images of data.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
INDEX = "index.html"

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file as it is served. etag: changes with the content."""

    content: bytes
    kind: str
    etag: str

    @classmethod
    def of(cls, name: str, content: bytes) -> "StaticFile":
        """Returns the file with this content. The name's ending says what kind it is."""
        return cls(content, kind_of(name), f'"{blake2b(content, digest_size=12).hexdigest()}"')


def kind_of(name: str) -> str:
    """Returns the media type of a file, by its name's ending."""
    return _KINDS[name[name.rindex(".") :]]


def static_files() -> Mapping[str, StaticFile]:
    """Returns the files of this package by their paths below `static`; files with an unknown ending are left out."""
    found = dict(_files_in(resources.files(__package__).joinpath("static"), ""))
    return {name: StaticFile.of(name, content) for name, content in found.items()}


def _files_in(folder: Traversable, beginning: str) -> Iterator[tuple[str, bytes]]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _files_in(each, f"{beginning}{each.name}/")
        elif each.name[each.name.rfind(".") :] in _KINDS:
            yield beginning + each.name, each.read_bytes()


def plotly_file() -> Path | None:
    """Returns where the installed package plotly has its program; None: it is not installed."""
    spec = importlib.util.find_spec("plotly")  # imports nothing
    folders = [] if spec is None else spec.submodule_search_locations or []
    found = (Path(folder) / "package_data" / PLOTLY for folder in folders)
    return next((path for path in found if path.is_file()), None)


def etag_of(path: Path) -> str:
    """Returns a value that changes with a file's size or its time, without reading the file. Raises OSError."""
    found = path.stat()
    return f'"{found.st_size:x}-{found.st_mtime_ns:x}"'
