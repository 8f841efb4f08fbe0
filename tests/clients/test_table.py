"""The tables of clients in api.md and in the README name the versions that the tests run."""

import json
import re
from pathlib import Path

from tests.clients import test_claude_code, test_codex, test_opencode
from tests.clients.environments import FOLDER, ROOT

PROGRAMS = {"Claude Code": "@anthropic-ai/claude-code", "Codex": "@openai/codex", "OpenCode": "opencode-ai"}
VERSION = re.compile(r"\d+\.\d+\.\d+")
OTHERS = {"axe-core", "zod"}  # no clients
LIBRARIES = {
    "LangChain": "langchain-openai",
    "LiteLLM": "litellm",
    "instructor": "instructor",
    "Pydantic AI": "pydantic-ai-slim",
}


def pinned(path: Path) -> dict[str, str]:
    """Exact versions in a file of pip's, by package."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), re.MULTILINE))


def node_packages() -> dict[str, str]:
    """Exact versions of the clients for Node, by package."""
    versions: dict[str, str] = json.loads((FOLDER / "node/package.json").read_text())["dependencies"]
    return {package: version for package, version in versions.items() if package not in OTHERS}


def test_the_table_of_clients_names_the_versions_that_run():
    section = (ROOT / "docs/api.md").read_text().partition("\n### Clients\n")[2].partition("\n### ")[0]
    named = dict(re.findall(r"^\| \[([^]]+)\]\(\S+\) \| (\S+) \|", section, re.MULTILINE))
    own, programs, node = pinned(ROOT / "constraints.txt"), pinned(FOLDER / "requirements.txt"), node_packages()
    names = {package: name for name, package in PROGRAMS.items()} | {"openai": "openai for Node"}
    assert named == {
        "openai": own["openai"],
        "anthropic": own["anthropic"],
        "cohere": own["cohere"],
        **{names.get(package, package): version for package, version in node.items()},
        **{package: programs[package] for package in LIBRARIES.values()},
    }
    assert f"over openai {programs['openai']}:" in section
    assert programs["anthropic"] == own["anthropic"]


def test_the_readme_names_the_same():
    table = (ROOT / "README.md").read_text().partition("\n## Clients\n")[2].partition("\n\n[")[0]
    own, programs, node = pinned(ROOT / "constraints.txt"), pinned(FOLDER / "requirements.txt"), node_packages()
    named = [
        *(f"{name} {node[package]}" for name, package in PROGRAMS.items()),
        f"OpenAI's for Python {own['openai']} and Node {node['openai']}",
        f"Anthropic's for Python {own['anthropic']} and Node {node['@anthropic-ai/sdk']}",
        f"Cohere's for Python {own['cohere']}",
        f"the AI SDK {node['ai']}",
        *(f"{name} {programs[package]}" for name, package in LIBRARIES.items()),
    ]
    assert [text for text in named if text not in table] == []
    assert sorted(VERSION.findall(table)) == sorted(VERSION.findall(" ".join(named)))


def test_the_settings_of_agents_are_those_that_run():
    url, model, context = "http://127.0.0.1:8000", "qwen", 40_960
    section = (ROOT / "docs/api.md").read_text().partition("\n### Agents\n")[2].partition("\n### ")[0]
    variables = " ".join(f"{name}={value}" for name, value in test_claude_code.settings(url, model).items())
    assert f"{variables} claude" in section
    assert f"{variables} claude" in (ROOT / "README.md").read_text()
    assert f"```toml\n{test_codex.CONFIG.format(url=url, model=model, context=context)}```" in section
    written = json.loads(section.partition("```json\n")[2].partition("```")[0])
    npm = test_opencode.PROVIDERS["chats"]
    assert written == {"provider": {"baton": test_opencode.provider_of(npm, url, model, context)}}
