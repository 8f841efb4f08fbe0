"""The table of clients in api.md names the versions that the tests run."""

import json
import re
from pathlib import Path

from tests.clients.environments import FOLDER

ROOT = FOLDER.parents[1]


def pinned(path: Path) -> dict[str, str]:
    """Exact versions in a file of pip's, by package."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), re.MULTILINE))


def test_the_table_of_clients_names_the_versions_that_run():
    section = (ROOT / "docs/api.md").read_text().partition("\n### Clients\n")[2].partition("\n### ")[0]
    named = dict(re.findall(r"^\| \[([^]]+)\]\(\S+\) \| (\S+) \|", section, re.MULTILINE))
    own, programs = pinned(ROOT / "constraints.txt"), pinned(FOLDER / "requirements.txt")
    node = json.loads((FOLDER / "node/package.json").read_text())["dependencies"]
    assert named == {
        "openai": own["openai"],
        "openai for Node": node["openai"],
        "anthropic": own["anthropic"],
        **{name: programs[name] for name in ("langchain-openai", "litellm", "instructor", "pydantic-ai-slim")},
    }
    assert f"over openai {programs['openai']}:" in section
