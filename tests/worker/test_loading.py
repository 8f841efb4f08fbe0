"""A worker that loads a model shows how far it is: a bar on a terminal, log lines elsewhere."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOADS = """
from services.config import LogFormat
from services.engine.runner.progress import KERNELS, WEIGHTS
from services.process.logs import configure_logging
from services.worker.loading import LoadingDisplay
configure_logging(LogFormat.TEXT)
with LoadingDisplay() as display:
    display.stage(WEIGHTS, 3 << 29)
    for _ in range(3):
        display.advance(1 << 29)
        display._bar.refresh()
    display.stage(KERNELS)
"""


def test_a_terminal_has_a_bar_that_goes_away() -> None:
    reader, terminal = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", LOADS], cwd=ROOT, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        while chunk := read(reader):
            shown += chunk
    os.close(reader)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert [int(percent) for percent in re.findall(r"(\d+)%", text)][-1] == 100
    assert text.index("reading weights") < text.index("preparing kernels")
    assert "gib" not in text
    assert shown.rstrip().endswith(b"\x1b[2K")  # the bar's line is erased


def test_elsewhere_each_stage_is_a_log_line() -> None:
    result = subprocess.run([sys.executable, "-c", LOADS], cwd=ROOT, capture_output=True, text=True)
    lines = [line.partition("] ")[2] for line in result.stderr.splitlines()]
    assert [" ".join(line.split()) for line in lines] == ["reading weights gib=1.5", "preparing kernels"]


def read(descriptor: int) -> bytes:
    """What a terminal shows; nothing when its last process is gone."""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""
