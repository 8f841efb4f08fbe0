"""`baton keys`, and the refusal to listen beyond the machine without keys."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli import checks
from services.config import Right
from services.config.option import OptionError, Refusal
from services.gateway.keys.authentication import Keys
from services.gateway.keys.file import read_keys
from services.process.configs import parse_api_keys

ROOT = Path(__file__).parents[2]


def baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_a_key_is_shown_once_and_works_until_it_is_revoked(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    limits = ["--requests-per-minute", "60", "--tokens-per-minute", "9000", "--max-concurrent", "4"]
    added = baton("keys", "add", str(file), "--tenant", "acme", "--priority", "5", "--right", "admin", *limits)
    assert added.returncode == 0
    (key,) = added.stdout.split()  # alone on stdout, for a script
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Keys((), read_keys(file)).caller(lambda name: key, Right.ADMIN).tenant == "acme"

    listed = baton("keys", "list", str(file)).stdout
    assert key not in listed
    head, row = listed.splitlines()
    assert head.split()[:4] == ["id", "tenant", "rights", "priority"]
    id, *cells = row.split()
    assert cells[:-1] == ["acme", "admin", "5", "60", "9000", "4"]
    assert id in added.stderr
    assert key not in added.stderr

    assert baton("keys", "revoke", str(file), id).stdout == f"key {id} is revoked\n"
    again = baton("keys", "revoke", str(file), id)
    assert (again.returncode, again.stderr) == (1, f"baton: {file} has no key {id}\n")


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    result = baton("keys", "add", str(tmp_path / "keys.json"), "--tenant", "two words")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("baton: tenant: a tenant has 1 to 128 letters")
    assert not (tmp_path / "keys.json").exists()
    result = baton("keys", "list", str(tmp_path / "none"))
    assert result.stderr == f"baton: {tmp_path}/none cannot be read: No such file or directory\n"


@pytest.mark.few(2)
@pytest.mark.parametrize("flag", ["--host", "--admin-host"])
@pytest.mark.parametrize("command", ["up", "gateway"])
def test_another_address_than_loopback_needs_keys(command: str, flag: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    options = ["--model", str(tmp_path), flag, "0.0.0.0", *(["--workers", "a:1"] if command == "gateway" else [])]
    result = baton(command, *options)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"baton: {flag} 0.0.0.0 needs keys (--keys FILE or BATON_API_KEY)")
    assert result.stderr.count("\n") == 1


def test_keys_or_a_word_of_the_user_open_other_addresses(tmp_path: Path) -> None:
    checks.check_keys(("127.0.0.1", "localhost"), (), None, allow_anonymous=False)
    checks.check_keys(("0.0.0.0", "::"), ("key",), None, allow_anonymous=False)
    checks.check_keys(("0.0.0.0", "::"), (), None, allow_anonymous=True)
    with pytest.raises(Refusal, match=r"--host gateway\.example needs keys"):
        checks.check_keys(("gateway.example", "::1"), (), None, allow_anonymous=False)
    with pytest.raises(Refusal, match="none cannot be read"):
        checks.check_keys(("127.0.0.1", "::1"), (), tmp_path / "none", allow_anonymous=True)


@pytest.mark.parametrize("text", ["two words", "x" * 513, "k\xe9y", "a,\x00b"])
def test_a_plain_key_that_no_header_can_have_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(OptionError, match="printable characters") as refused:
        parse_api_keys(text)
    assert text not in str(refused.value)
    assert parse_api_keys(" a, b,") == ("a", "b")
