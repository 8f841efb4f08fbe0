"""Processes end with whoever started them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from services.process import lifeline

ROOT = Path(__file__).parents[2]
HOLD = "from services.process import lifeline; lifeline.hold(); print('held', flush=True); import time; time.sleep(60)"


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**os.environ, lifeline.PARENT_VARIABLE: str(gone.pid)}
    child = subprocess.run([sys.executable, "-c", HOLD], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert child.returncode == 1
    assert child.stderr == f"baton: the parent process {gone.pid} is gone\n"


def test_a_process_without_a_named_parent_outlives_it() -> None:
    """Started by hand from a shell, a worker must survive the shell."""
    start = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {HOLD!r}]).pid)"
    parent = subprocess.Popen([sys.executable, "-c", start], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert parent.stdout.readline() == "held\n"
    parent.wait()
    time.sleep(0.2)
    assert child.is_running()
    child.kill()
    parent.stdout.close()


def test_the_variable_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child's own children would name a grandparent and refuse to start."""
    monkeypatch.setenv(lifeline.PARENT_VARIABLE, str(os.getppid()))
    code = "import os; from services.process import lifeline; lifeline.hold(); print(sorted(os.environ))"
    environment = {**os.environ, **lifeline.environment()}
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert child.returncode == 0
    assert lifeline.PARENT_VARIABLE not in child.stdout
