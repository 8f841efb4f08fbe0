"""Help texts: every option in a group, and at any width its name whole."""

import re
from importlib.metadata import version

import pytest
import typer
from typer.testing import CliRunner

from services.cli.commands import app
from services.config.option import options_of
from services.process.configs import GatewayConfig, UpConfig, WorkerConfig

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
INNER = [[group, name] for group in ("keys", "models") for name in COMMANDS[group].commands]
EVERY = [[], *([name] for name in COMMANDS), *INNER]


def help_of(arguments: list[str], columns: int, **environment: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": str(columns), **environment})
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
@pytest.mark.parametrize("arguments", EVERY, ids=" ".join)
def test_no_line_is_wider_than_the_terminal_and_every_name_is_whole(arguments: list[str], columns: int) -> None:
    text = help_of(arguments, columns)
    assert max(map(len, text.splitlines())) <= columns
    command = typer.main.get_command(app)
    for name in arguments:
        command = command.commands[name]  # type: ignore[attr-defined]
    for parameter in command.params:
        for shown in parameter.opts if parameter.param_type_name == "option" else [str(parameter.metavar)]:
            assert re.search(rf"^  {re.escape(shown)}( |$)", text, re.MULTILINE), shown
    assert "…" not in text
    assert "<" not in re.sub(r"\[[^]]*\]", "", text)


@pytest.mark.parametrize("kind", [UpConfig, GatewayConfig, WorkerConfig])
def test_every_option_is_in_a_group(kind: type) -> None:
    assert [field.flag for field in options_of(kind) if field.option.panel is None] == []


def test_the_groups_of_up_begin_with_the_model() -> None:
    headings = re.findall(r"\n\n(\w.*)\n  --", help_of(["up"], 80))
    assert headings[0] == "Model"
    assert headings[-1] == "Options"
    assert len(headings) == len(set(headings)) > 6


def test_choices_that_do_not_fit_have_further_lines() -> None:
    text = help_of(["up"], 60)
    assert "  --tool-parser auto|none|deepseek-v3|deepseek-v31|\n      functools|granite|harmony|hermes|" in text


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"baton {version('baton-serve')}\n")
