"""The load test's clients against a stack that asks for keys and speaks TLS."""

import json
from pathlib import Path

import pytest

from loadtest.__main__ import main
from tests.e2e.conftest import SecureUp

SMALL = ["--input", "40", "--output", "3"]


@pytest.fixture
def urls(secure: SecureUp) -> list[str]:
    api, admin = (f"https://127.0.0.1:{port}" for port in (secure.up.port, secure.up.admin_port))
    return ["client", "--url", api, "--admin-url", admin, "--requests", "3", "--warmup", "1", *SMALL]


@pytest.mark.long
def test_a_key_and_an_authority_open_a_stack_with_keys_and_tls(urls: list[str], secure: SecureUp, tmp_path: Path):
    """Baton's counters are read at the admin port, by TLS too."""
    result, ca = tmp_path / "result.json", str(secure.up.ca_file)
    assert main([*urls, "--ca", ca, "--api-key", secure.keys.acme, "--json", str(result)]) == 0
    numbers = json.loads(result.read_text())
    assert (numbers["failed"], numbers["output_tokens"], numbers["handed_off"]) == (0, 9, 1.0)


@pytest.mark.long
def test_the_key_may_be_in_the_environment(urls: list[str], secure: SecureUp, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BATON_API_KEY", f"{secure.keys.acme},another")
    assert main([*urls, "--ca", str(secure.up.ca_file)]) == 0
    overload = ["overload", "--slo", "30", "--times", "1", "--seconds", "0.5", "--concurrency", "2", *SMALL]
    assert main([*overload, "--url", f"https://127.0.0.1:{secure.up.port}", "--ca", str(secure.up.ca_file)]) == 0


@pytest.mark.long
def test_without_a_key_or_the_authority_there_is_no_run(
    urls: list[str], secure: SecureUp, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    assert main([*urls, "--ca", str(secure.up.ca_file)]) == 2
    assert "status 401" in capsys.readouterr().err
    assert main([*urls, "--api-key", secure.keys.acme]) == 2
    assert "certificate verify failed" in capsys.readouterr().err
    (missing := tmp_path / "ca.crt").write_text("none")
    assert main([*urls, "--ca", str(missing)]) == 2
    assert f"{missing} has no certificate of an authority" in capsys.readouterr().err
