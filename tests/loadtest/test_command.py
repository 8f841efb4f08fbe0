"""`python -m loadtest NAME`: the benchmark with this name gets the other arguments."""

import subprocess
import sys

import pytest

from loadtest.__main__ import main


@pytest.mark.parametrize("name", ["client", "compare", "gpu", "micro", "overload"])
def test_a_name_starts_its_benchmark(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main([name, "--help"])
    assert exited.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m loadtest {name} ")


def test_the_writer_of_the_demo_model_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smollm2"]) == 2
    assert "smollm2 DIR" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpu", "micro"])
def test_modules_that_had_a_command_still_have_one(name: str) -> None:
    ended = subprocess.run([sys.executable, "-m", f"loadtest.{name}", "--help"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"usage: python -m loadtest {name} ")


def test_a_name_that_there_is_not_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scheduler"]) == 2
    assert capsys.readouterr().err.startswith(
        "loadtest: no benchmark is called scheduler; there are agreement, client, compare, "
    )


def test_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "python -m loadtest compare" in capsys.readouterr().out
