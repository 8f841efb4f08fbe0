"""How many frames a second a list of requests is drawn at while it scrolls: `python -m tests.console.scrolling`.

Chromium scrolls through all rows and back, and counts the frames that come by requestAnimationFrame. A screen shows 60
a second, and so does a headless browser at most; a frame that takes too long is missing. Rows change every second, as
in a gateway that serves.
"""

import argparse
import time
from itertools import pairwise

import psutil

from tests.console.browser import Browser, running_browser
from tests.console.made_up import MadeUpFeed
from tests.console.stand_in import serving

# A hand's hard push, and the scroll bar that is pulled from one end to the other in four seconds.
_SPEEDS = {"pushed, 8,000 px/s": 8000.0, "the bar pulled, whole list in 4 s": None}
_SCROLL = """
const [seconds, speed, done] = arguments;
const scroller = document.querySelector(".scroller");
const far = scroller.scrollHeight - scroller.clientHeight;
const pace = speed ?? far / 4;
const began = performance.now();
const times = [];
function frame(now) {
  times.push(now);
  const passed = (performance.now() - began) / 1000;
  if (passed >= seconds) return done(times);
  const way = (passed * pace) % (2 * far);
  scroller.scrollTop = way < far ? way : 2 * far - way;
  requestAnimationFrame(frame);
}
requestAnimationFrame(frame);
"""


def frames(browser: Browser, seconds: float, speed: float | None) -> list[float]:
    """The milliseconds between frames while the list scrolls. speed: pixels a second; None: its whole in 4 s."""
    times: list[float] = browser.driver.execute_async_script(_SCROLL, seconds, speed)
    return [after - before for before, after in pairwise(times)]


def processor_s(browser: Browser) -> float:
    """The seconds of processor that all of the browser's processes have used."""
    driver = psutil.Process(browser.driver.service.process.pid)
    return sum(sum(process.cpu_times()[:2]) for process in driver.children(recursive=True))


def main() -> None:
    """Prints a line for each speed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    with serving(MadeUpFeed(time.time(), num_requests=options.requests)) as stand_in, running_browser() as browser:
        browser.open(f"{stand_in.url}#/requests")
        browser.wait_for(".space .request-row")
        for name, speed in _SPEEDS.items():
            before = processor_s(browser)
            gaps = frames(browser, options.seconds, speed)
            used = 1000 * (processor_s(browser) - before) / len(gaps)
            print(f"{name}: {_words(gaps)}, {used:.1f} ms of processor a frame", flush=True)
        print(f"{options.requests} requests, {len(browser.all('.space .request-row'))} rows as elements")
        browser.driver.get("about:blank")


def _words(gaps: list[float]) -> str:
    rate, late = 1000 * len(gaps) / sum(gaps), sum(gap > 20 for gap in gaps)
    return f"{rate:.1f} frames a second, longest {max(gaps):.1f} ms, {late} of {len(gaps)} above 20 ms"


if __name__ == "__main__":
    main()
