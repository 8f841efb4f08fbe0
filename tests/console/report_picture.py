"""A picture of a report of `baton bench`, of two runs side by side: `python -m tests.console.report_picture OUT.png`.

The runs are real ones against a stack that runs already, as that of `make up`: requests of the same lengths, few and
many at a time, each run with prompts of its own. The picture is the upper part of the page.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.console.browser import Browser, running_browser

AT_A_TIME = (2, 8)
WORKLOAD = ("--input", "100-300", "--output", "32-64")
SLO = "ttft=2s,itl=500ms"
WIDTH, HEIGHT = 1265, 815  # down to the end of the distributions


def run(url: str, admin_url: str, concurrency: int, requests: int, file: Path) -> None:
    """Runs `baton bench`, whose words go to the terminal, and writes its result."""
    server = ("--url", url, "--admin-url", admin_url, "--requests", str(requests))
    paced = (
        "--concurrency",
        str(concurrency),
        "--seed",
        str(concurrency),
        "--slo",
        SLO,
        "--label",
        f"{concurrency} at a time",
        "--json",
        str(file),
    )
    subprocess.run([sys.executable, "-m", "services.cli", "bench", *server, *WORKLOAD, *paced], check=True)


def take(browser: Browser, page: Path, picture: Path) -> None:
    """Takes the upper part of a page."""
    browser.open(page.as_uri(), width=WIDTH)
    browser.wait_for(".plot .main-svg")
    browser.picture(picture, HEIGHT)


def main() -> None:
    """Runs both, and takes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the picture")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (%(default)s)")
    parser.add_argument("--admin-url", default="http://127.0.0.1:9001", help="its admin port (%(default)s)")
    parser.add_argument("--requests", type=int, default=48, help="of each run (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_browser() as browser:
        files = [Path(folder) / f"{concurrency}.json" for concurrency in AT_A_TIME]
        for concurrency, file in zip(AT_A_TIME, files, strict=True):
            run(options.url, options.admin_url, concurrency, options.requests, file)
        page = Path(folder) / "report.html"
        report = [sys.executable, "-m", "services.cli", "bench", "report", *map(str, files), "--report", str(page)]
        subprocess.run(report, check=True)
        take(browser, page, options.out)


if __name__ == "__main__":
    main()
