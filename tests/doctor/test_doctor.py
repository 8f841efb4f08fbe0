"""`baton doctor`: its options, words, JSON, exit codes and limits of time."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest

from services.config import API_KEY_VARIABLE, KEYS_VARIABLE, MTLS_VARIABLE, REDIS_URL_VARIABLE
from services.doctor.check import Check, examine, in_thread
from services.doctor.finding import CannotCheck, Examined, Finding, Level, error, exit_code, note, ok, warning, worst
from services.doctor.report import as_json, as_text
from tests.failures import FAILURES, NAMES

ROOT = Path(__file__).parents[2]
# Programs read this form: further properties may come, none of these may go or change.
SCHEMA = {
    "type": "object",
    "required": ["version", "worst", "findings"],
    "properties": {
        "version": {"const": 1},
        "worst": {"enum": ["ok", "note", "warning", "error"]},
        "findings": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["group", "name", "level", "found", "advice", "figures"],
                "properties": {
                    "group": {"type": "string"},
                    "name": {"type": "string"},
                    "level": {"enum": ["ok", "note", "warning", "error"]},
                    "found": {"type": "string"},
                    "advice": {"type": ["string", "null"]},
                    "figures": {"type": "object", "additionalProperties": {"type": "number"}},
                },
            },
        },
    },
}
EXAMINED = [Examined("one", (ok("a", "fine"), warning("b", "odd", "mend it"))), Examined("two", (note("c", "said"),))]


def baton_doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    variables = (API_KEY_VARIABLE, KEYS_VARIABLE, MTLS_VARIABLE, REDIS_URL_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    command = [sys.executable, "-m", "services.cli", "doctor", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


def test_without_options_it_looks_at_the_machine() -> None:
    result = baton_doctor("--json")
    found = json.loads(result.stdout)
    jsonschema.validate(found, SCHEMA)
    groups = {finding["group"] for finding in found["findings"]}
    assert groups == {"processor", "memory and limits", "torch", "KV transports", "ports"}
    assert result.returncode == (2 if found["worst"] == "error" else 0)
    assert result.stderr == ""


def test_errors_are_exit_code_2_in_words_too(tmp_path: Path) -> None:
    """Nothing listens at port 1. Words that are no terminal's have no colours."""
    nowhere = ["--redis-url", "redis://user:a-password@127.0.0.1:1", "--workers", "127.0.0.1:1"]
    result = baton_doctor(*nowhere, "--gateway", "http://127.0.0.1:1", "--keys", str(tmp_path / "none"))
    assert result.returncode == 2
    assert "\x1b" not in result.stdout
    assert result.stdout.splitlines()[-1].startswith("4 errors, ")
    assert "  error    reached: 127.0.0.1:1: " in result.stdout
    assert "a-password" not in result.stdout + result.stderr


def test_half_a_certificate_is_refused() -> None:
    result = baton_doctor("--tls-cert", "a")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "baton: --tls-cert and --tls-key belong together: name both\n"


def test_exit_codes() -> None:
    codes = {level: (exit_code(level, strict=False), exit_code(level, strict=True)) for level in Level}
    assert codes == {Level.OK: (0, 0), Level.NOTE: (0, 0), Level.WARNING: (0, 1), Level.ERROR: (2, 2)}
    assert worst([]) is Level.OK
    assert worst(EXAMINED) is Level.WARNING
    assert worst([*EXAMINED, Examined("three", (error("d", "gone", "come"),))]) is Level.ERROR


def test_json_has_each_finding() -> None:
    found = json.loads(as_json(EXAMINED))
    jsonschema.validate(found, SCHEMA)
    assert found["worst"] == "warning"
    assert found["findings"][1] == {
        "group": "one",
        "name": "b",
        "level": "warning",
        "found": "odd",
        "advice": "mend it",
        "figures": {},
    }


def test_words_have_colours_and_a_summary() -> None:
    text = as_text(EXAMINED)
    assert "\x1b[33mwarning\x1b[0m  b: odd\n           -> mend it\n" in text
    assert text.endswith("\n\n0 errors, 1 warning, 2 other findings")


async def test_a_check_that_takes_too_long_or_cannot_be_done_says_so_and_others_go_on() -> None:
    async def hang() -> list[Finding]:
        await asyncio.Event().wait()
        return []

    async def cannot() -> list[Finding]:
        raise CannotCheck("not here")

    def unreadable() -> list[Finding]:
        raise PermissionError(13, "Permission denied", "/a/file")

    ended = threading.Event()

    def block() -> list[Finding]:
        ended.wait()
        return []

    checks = [
        Check("hangs", hang, 0.05),
        Check("blocks", in_thread(block), 0.05),
        Check("cannot", cannot),
        Check("unreadable", in_thread(unreadable)),
        Check("fine", in_thread(lambda: [ok("a", "b")])),
    ]
    try:
        async with asyncio.timeout(300):
            examined = {each.group: each.findings for each in await examine(checks)}
    finally:
        ended.set()
    late = (note("not checked", "no result within 0.05 s"),)
    assert examined == {
        "hangs": late,
        "blocks": late,
        "cannot": (note("not checked", "not here"),),
        "unreadable": (note("not checked", "[Errno 13] Permission denied: '/a/file'"),),
        "fine": (ok("a", "b"),),
    }


@pytest.mark.parametrize("failure", FAILURES, ids=NAMES)
async def test_a_defect_of_one_check_is_an_error_of_it_and_hides_no_other(failure: Exception) -> None:
    def wrong() -> list[Finding]:
        raise failure

    wrong_one, fine = await examine(
        [Check("wrong", in_thread(wrong)), Check("fine", in_thread(lambda: [ok("a", "b")]))]
    )
    assert fine.findings == (ok("a", "b"),)
    (found,) = wrong_one.findings
    if not isinstance(failure, OSError):  # which a check may meet
        assert found.level is Level.ERROR
        assert type(failure).__name__ in found.found
