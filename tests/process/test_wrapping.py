"""Lines for a terminal are broken at words, and levels have colours where NO_COLOR does not forbid it."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.doctor.finding import Examined, Finding, Level
from services.doctor.report import as_text
from services.process.wrapping import wrap

ROOT = Path(__file__).parents[2]
LOGS = """
import structlog
from services.config import LogFormat
from services.process.logs import configure_logging
writer = configure_logging(LogFormat.TEXT)
structlog.get_logger().warning("words that are many", reason="because " * 20, other=5)
writer.close()
"""
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def test_a_line_is_broken_at_words_and_indented() -> None:
    assert wrap("one two three four five six", 24, 4) == "one two three four five\n    six"
    assert wrap("a  b", 24, 4) == "a  b"
    assert wrap("x" * 30 + " y", 24, 2) == "x" * 30 + "\n  y"
    assert wrap("one two three four five six", None, 4) == "one two three four five six"
    assert wrap("one two three four five six", 10, 4) == "one two three four five six"
    assert (
        wrap("\x1b[31mone\x1b[0m two three four five six", 24, 4) == "\x1b[31mone\x1b[0m two three four five\n    six"
    )


@pytest.mark.parametrize("words", [40, 200])
def test_no_word_is_lost(words: int) -> None:
    line = " ".join(f"w{number}" + " " * (number % 3) for number in range(words))
    assert wrap(line, 40, 6).split() == line.split()
    assert max(map(len, wrap(line, 40, 6).splitlines())) <= 40


@pytest.mark.parametrize(
    ("environment", "coloured"), [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False)]
)
def test_a_terminal_gets_log_lines_of_its_width_with_coloured_levels(
    environment: dict[str, str], coloured: bool
) -> None:
    reader, terminal = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | environment
    command = [sys.executable, "-c", LOGS]
    with subprocess.Popen(command, cwd=ROOT, stderr=terminal, env=variables | {"COLUMNS": "60"}):
        os.close(terminal)
        shown = b""
        try:
            while chunk := os.read(reader, 1 << 16):
                shown += chunk
        except OSError:  # the last process that had the terminal is gone
            pass
    os.close(reader)
    text = shown.decode()
    assert (ESCAPES.search(text) is not None) == coloured
    lines = ESCAPES.sub("", text).splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 60
    assert " ".join(lines).count("because") == 20


def test_a_pipe_gets_one_line_without_colours() -> None:
    variables = os.environ | {"COLUMNS": "60"}
    result = subprocess.run([sys.executable, "-c", LOGS], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert len(result.stderr.splitlines()) == 1
    assert "\x1b" not in result.stderr


def test_the_doctor_s_lines_have_the_terminal_s_width() -> None:
    finding = Finding("name", Level.WARNING, "found " * 30, advice="do " * 40)
    examined = [Examined("group", (finding,))]
    lines = ESCAPES.sub("", as_text(examined, 60)).splitlines()
    assert max(map(len, lines)) <= 60
    assert len(lines) > len(as_text(examined).splitlines())
