"""/docs: Swagger UI over /openapi.json, from a package that is installed beside Baton. It asks no other server.

The wheel `swagger-ui-bundle-v2` has the files of Swagger UI's own distribution (that of `swagger-ui-bundle` is too old
for OpenAPI 3.1). Where it is not installed, the page says so.
"""

import importlib.util
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

STYLE, SCRIPT = "swagger-ui.css", "swagger-ui-bundle.js"  # files of the distribution, below /docs/
INSTALL = "pip install swagger-ui-bundle-v2"

_PACKAGE = "swagger_ui_bundle"  # what the wheel installs; never imported
_START = """
SwaggerUIBundle({
  url: "openapi.json", dom_id: "#page", deepLinking: true, validatorUrl: "none", tryItOutEnabled: true,
  defaultModelsExpandDepth: 0, displayRequestDuration: true, persistAuthorization: false
});
"""
_OWN_STYLE = """
body { margin: 0; } .swagger-ui .info { margin: 24px 0 8px; } .swagger-ui .scheme-container { padding: 12px 0; }
@media (prefers-color-scheme: dark) { body { background: #fff; } }
"""
_PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Baton: API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/{STYLE}">
<style>{_OWN_STYLE}</style>
</head>
<body>
<div id="page"></div>
<script src="docs/{SCRIPT}"></script>
<script>{_START}</script>
</body>
</html>
"""
_ABSENT = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Baton: API</title></head>
<body>
<p>This page needs Swagger UI, which is not installed where the gateway runs: <code>{INSTALL}</code>.</p>
<p>What it would show is in <a href="openapi.json">openapi.json</a>.</p>
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class DocsPage:
    """The page, its Content-Security-Policy, and the files that it loads, by name; none without Swagger UI."""

    html: bytes
    policy: str
    files: Mapping[str, bytes]


def docs_page() -> DocsPage:
    """Returns the page, with Swagger UI where it is installed."""
    folder = _distribution()
    if folder is None:
        return DocsPage(_ABSENT.encode(), _policy("default-src 'none'"), {})
    # Swagger UI sets styles of single elements, and has its icons as data.
    policy = _policy(
        f"default-src 'none'; script-src 'self' {_hash(_START)}; style-src 'self' {_hash(_OWN_STYLE)}; "
        "style-src-attr 'unsafe-inline'; img-src data:; connect-src 'self'"
    )
    return DocsPage(_PAGE.encode(), policy, {name: (folder / name).read_bytes() for name in (STYLE, SCRIPT)})


def _policy(sources: str) -> str:
    return f"{sources}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _distribution() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    found = [path.parent for folder in folders for path in sorted(Path(folder).glob(f"vendor/*/{SCRIPT}"))]
    return next((path for path in found if (path / STYLE).is_file()), None)
