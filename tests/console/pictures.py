"""Pictures of every page of the console, at both widths and in both themes: `python -m tests.console.pictures OUT`.

They are taken of a real stack with a tiny model, under load, so they stay true. One of its workers is killed before the
last pictures of the fleet, and comes back. `--url URL` takes a console that runs already instead, as that of `make up`.
"""

import argparse
import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.console.asking import ask, asking
from tests.console.browser import NARROW, THEMES, WIDE, Browser, running_browser
from tests.console.conftest import console
from tests.console.made_up import MadeUpFeed
from tests.console.stand_in import serving
from tests.console.test_playground import send
from tests.e2e.conftest import write_model
from tests.e2e.stack import Gateway, Stack, worker_ports

SETTLES_S = 1.2
WIDTHS = {"wide": WIDE, "narrow": NARROW}


class Album:
    """Takes pictures of pages, each at both widths and in both themes, into a folder."""

    def __init__(self, browser: Browser, folder: Path) -> None:
        self._browser = browser
        self._folder = folder

    def take(self, name: str, url: str, ready: str, text: str = "") -> None:
        """Takes the pictures of a page, once there is an element `ready` that has a text."""
        for theme in THEMES:
            for width, pixels in WIDTHS.items():
                self._browser.open(url, width=pixels, theme=theme)
                self._browser.wait_for(ready, text)
                if name == "playground":
                    _chat(self._browser)
                time.sleep(SETTLES_S)
                path = self._folder / f"{name}-{width}-{theme}.png"
                self._browser.picture(path)
                print(path, flush=True)


def _chat(browser: Browser) -> None:
    browser.fill("System prompt", "You are a helpful assistant.")
    browser.fill("Most tokens", "40")
    browser.fill("Answers (n)", "2")
    browser.fill("Further fields, as JSON", '{"ignore_eos": true}')
    browser.field("Logprobs, as colours").click()
    send(browser, "What is a handoff?")
    browser.wait_for(".served", "generated")
    browser.wait_for(".served", "handed over")
    browser.run('document.querySelectorAll(".choice .token")[4].focus()')


@contextlib.contextmanager
def _traffic(gateway: Gateway) -> Iterator[None]:
    with contextlib.ExitStack() as streams:
        for num_tokens in (4, 24, 60):
            streams.enter_context(asking(gateway, num_tokens))
        yield


def take_all(folder: Path, warm_s: float) -> None:
    """Takes all pictures."""
    with tempfile.TemporaryDirectory() as home, running_browser() as browser:
        model = write_model(Path(home) / "model", "llama", max_position_embeddings=4096)
        album = Album(browser, folder)
        stack = Stack(model, worker_ports(2, 2), [], None)
        with stack.running("--ttft-slo", "5"):
            _of_stack(album, stack, warm_s)
        _of_more(album)


def _of_stack(album: Album, stack: Stack, warm_s: float) -> None:
    gateway = stack.gateway
    with _traffic(gateway):
        threading.Event().wait(warm_s)
        album.take("fleet", console(gateway), "article.card[data-role=decode]")
        album.take("requests", console(gateway, "requests"), ".space .request-row")
        album.take("cache", console(gateway, "cache"), ".chart .plot .main-svg")
        album.take("latency", console(gateway, "latency"), ".chart .plot .main-svg")
        stack.workers["decode-1"].kill()
        album.take("fleet-worker-gone", console(gateway), "article.card .badge", "gone")
        stack.heal()
    request_id = ask(gateway, "shared by many " * 60, num_tokens=60)
    album.take("request", console(gateway, f"requests/{request_id}"), "table.phases tfoot")
    album.take("playground", console(gateway, "playground"), "h1", "Playground")


def _of_url(album: Album, url: str) -> None:
    """Pages of a console without keys whose gateway has had requests."""
    album.take("playground", f"{url}#/playground", "h1", "Playground")
    album.take("fleet", f"{url}#/fleet", "article.card[data-role=decode]")
    album.take("requests", f"{url}#/requests", ".space .request-row")
    album.take("cache", f"{url}#/cache", ".chart .plot .main-svg")
    album.take("latency", f"{url}#/latency", ".chart .plot .main-svg")


def _of_more(album: Album) -> None:
    """Pages with more than a small machine runs."""
    with serving(MadeUpFeed(time.time(), num_prefill=4, num_decode=6, num_requests=5000)) as stand_in:
        album.take("fleet-large", f"{stand_in.url}#/fleet", ".links-drawing .rate", "handoffs")
        album.take("requests-5000", f"{stand_in.url}#/requests", ".space .request-row")
    with serving(MadeUpFeed(time.time(), has_plotly=False)) as stand_in:
        album.take("latency-without-plotly", f"{stand_in.url}#/latency", ".note", "pip install")


def main() -> None:
    """Takes all pictures and prints their paths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the pictures")
    parser.add_argument("--warm-s", type=float, default=30.0, help="seconds of load before the first picture")
    parser.add_argument("--url", help="of a console that runs already, as http://127.0.0.1:9001/console/")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.url is None:
        take_all(options.out, options.warm_s)
    else:
        with running_browser() as browser:
            _of_url(Album(browser, options.out), options.url)


if __name__ == "__main__":
    main()
