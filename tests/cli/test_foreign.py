"""What people type who come from other servers: the refusal names Baton's own option, and the documents have it too."""

import pytest
import typer

from services.cli import foreign
from services.cli.commands import app
from services.config.option import Refusal
from tests.test_docs import REFERENCE, rows

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OURS = {flag for name in ("up", "gateway") for parameter in COMMANDS[name].params for flag in parameter.opts}


def refusal(*arguments: str) -> str:
    with pytest.raises(Refusal) as refused:
        typer.main.get_command(app).main(list(arguments), prog_name="baton", standalone_mode=False)
    return str(refused.value)


@pytest.mark.parametrize("option", foreign.OPTIONS, ids=lambda option: option.names[0])
def test_an_option_of_another_server_is_refused_with_what_is_here_instead(option: foreign.Foreign) -> None:
    for name in option.names:
        said = refusal("up", "--model", "m", name, "2")
        assert said.startswith(f"{name} ({option.servers}) ")
        assert option.here in said
    if option.here.startswith("--"):
        assert option.here in OURS


@pytest.mark.parametrize("command", foreign.COMMANDS, ids=lambda command: command.names[0])
def test_a_command_of_another_server_is_refused_with_what_is_here_instead(command: foreign.Foreign) -> None:
    for name in command.names:
        assert refusal(name, "--tp", "2") == f"`{name}` ({command.servers}) is no command here: {command.here}"


def test_no_name_is_there_twice_or_baton_s_own() -> None:
    names = [name for each in (*foreign.OPTIONS, *foreign.COMMANDS) for name in each.names]
    assert len(names) == len(set(names))
    assert not {*names} & {*OURS, *COMMANDS}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "up --speculative_config={}",
            "--speculative_config (vLLM) is no option here: not there yet: speculative deco",
        ),
        ("up --max_model_len 100", "--max_model_len is spelled --max-model-len"),
        (
            "gateway --gpu-memory-utilization 0.5",
            "--gpu-memory-utilization (vLLM) is --gpu-memory-fraction here, an op",
        ),
        ("gateway --kv-memory 1GiB", "--kv-memory is no option of `baton gateway`: `baton up` or `baton prefill` or"),
        ("drain h:1 --mtls d --host h", "--host is no option of `baton drain`: `baton up` or `baton gateway` or"),
        ("--model m", "--model belongs behind a command that has it: `baton up` or `baton gateway` or"),
        ("--tp 2", "--tp belongs behind a command that has it: `baton up`"),
    ],
)
def test_the_spelling_and_the_place_of_an_option_are_said(arguments: str, said: str) -> None:
    assert refusal(*arguments.split()).startswith(said)


def test_an_option_that_nobody_has_is_an_error_of_usage() -> None:
    with pytest.raises(Exception, match="No such option: --nonsense"):
        typer.main.get_command(app).main(["up", "--nonsense"], prog_name="baton", standalone_mode=False)


@pytest.mark.parametrize(
    ("heading", "table"),
    [("## Options of other servers", foreign.OPTIONS), ("## Commands of other servers", foreign.COMMANDS)],
)
def test_the_reference_has_the_table(heading: str, table: tuple[foreign.Foreign, ...]) -> None:
    """Its rows are written as this test makes them."""
    described = [
        [
            ", ".join(f"`{name}`" for name in each.names),
            each.servers,
            f"`{each.here}`" if each.here[0] == "-" else each.here,
        ]
        for each in table
    ]
    assert list(rows(REFERENCE, heading)) == described
