"""Log streams that cannot be written to, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging, sys
import structlog
from services.config import LogFormat
from services.process.logs import configure_logging
writer = configure_logging(LogFormat.TEXT)
for number in range(12_000):
    structlog.get_logger().info("line", number=number)
    logging.getLogger("library").warning("line %s", number)
print("all is logged", flush=True)
sys.stdin.readline()
writer.flush()
structlog.get_logger().info("last line", dropped=writer.num_dropped)
print(writer.num_dropped, flush=True)
"""


def test_a_full_disk_fails_nobody_who_logs_and_the_exit_code_stays_0():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], input=b"\n", stdout=subprocess.PIPE, stderr=full, timeout=120, check=False
        )
    assert done.returncode == 0
    assert int(done.stdout.split()[-1]) > 0


def test_a_pipe_that_nobody_reads_stops_nobody_and_says_later_what_was_dropped():
    command = [sys.executable, "-c", PROGRAM]
    pipes = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipes, stdout=pipes, stderr=pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"all is logged\n"  # and nobody has read
        out, error = process.communicate(b"\n", timeout=120)
    lines = error.decode().splitlines()
    assert process.returncode == 0
    dropped = sum(int(line.rpartition("lines=")[2]) for line in lines if "log lines dropped" in line)
    assert dropped == int(out)
    assert (
        len([line for line in lines if "number=" in line or ("[warning" in line and "library" in line)]) + dropped
        >= 24_000
    )
    assert "last line" in lines[-1]


def test_lines_are_flushed_at_exit(tmp_path: Path):
    program = PROGRAM.replace("range(12_000)", "range(50)").replace("sys.stdin.readline()", "")
    with (tmp_path / "log").open("wb") as log:
        subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=log, timeout=120, check=True)
    assert len((tmp_path / "log").read_text().splitlines()) == 101
    assert os.path.getsize(tmp_path / "log") > 0
