"""Headless Chromium with one page: what a person sees of it, what its console says, and whom it asks.

The browser and its driver are the distribution's (`apt install chromium chromium-driver`), driven by selenium.
"""

import base64
import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select

BROWSER, DRIVER = "chromium", "chromedriver"
WIDE, NARROW = 1280, 400  # pixels
HEIGHT = 900
THEMES = ("light", "dark")
WAIT_S = 20.0
# What a page has when it shows something: of a fleet with workers, a gateway that had requests and has plotly.
READY = {
    "fleet": "article.card[data-role=decode]",
    "requests": ".space .request-row",
    "cache": ".chart .plot .main-svg",
    "latency": ".chart .plot .main-svg",
    "playground": ".playground textarea",
}
READY_ONE = ".request-page .figure, .request-page .why"  # of one request, or of one that is not known

_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, in a container
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing elsewhere can be asked
    "--disable-component-update",
    "--disable-background-networking",
)
# The page's own word of what its policy kept out: the log of the browser has it too, but not on whose behalf.
_NOTE_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.effectiveDirective} ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`);
});
"""


@dataclass
class Browser:
    """One tab. asked: the URLs of all requests of the page so far."""

    driver: webdriver.Chrome
    asked: list[str] = field(default_factory=list)
    _errors: list[str] = field(default_factory=list)

    def open(self, url: str, *, width: int = WIDE, theme: str = "light", still: bool = False) -> None:
        """Opens a page anew, without what an earlier one kept. still: a person who wants no motion."""
        if self.driver.current_url.startswith("http"):
            self.run("sessionStorage.clear(); localStorage.clear()")
        self.driver.get("about:blank")
        self.drain()
        self.asked, self._errors = [], []
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        motion = {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}, motion])
        self.driver.get(url)

    def go(self, page: str, ready: str | None = None) -> None:
        """Follows the address of a page of the console, and waits until that page has what it shows.

        ready: another selector than READY has for it.
        """
        self.run("location.hash = arguments[0]", f"#/{page}")
        name, _, one = page.partition("/")
        title = f"Request {one.partition('?')[0]}" if one else name.capitalize()
        self.wait_until(lambda: self.driver.title.startswith(f"{title} ·"), f"the page {page}")
        self.wait_for(ready or (READY_ONE if one else READY[name]))

    def command(self, name: str, **parameters: object) -> dict[str, Any]:
        """A command of the DevTools protocol."""
        answer: dict[str, Any] = self.driver.execute_cdp_cmd(name, parameters)
        return answer

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns that runs in the page."""
        return self.driver.execute_script(script, *arguments)

    def run_module(self, file: str, expression: str) -> Any:
        """What an expression says of `module`, a module of the console's. A promise is waited for."""
        then = f".then(async (module) => done(await ({expression}))).catch((error) => done(`${{error}}`))"
        return self.driver.execute_async_script(f"const done = arguments[0]; import('./{file}'){then};")

    def find(self, selector: str) -> WebElement:
        """The first element that is shown."""
        return next(element for element in self.all(selector) if element.is_displayed())

    def all(self, selector: str) -> Sequence[WebElement]:
        """Elements by a CSS selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def field(self, label: str) -> WebElement:
        """The field of a label, which may be within details that are closed; they are opened."""
        script = """const label = Array.from(document.querySelectorAll("label"))
              .find((each) => each.textContent === arguments[0]);
            for (let box = label.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
            return label.control"""
        found: WebElement = self.run(script, label)
        return found

    def fill(self, label: str, value: str) -> None:
        """Writes into the field of a label, instead of what it has."""
        field = self.field(label)
        field.clear()
        field.send_keys(value)

    def choose(self, label: str, value: str) -> None:
        """Chooses a value of a list."""
        Select(self.field(label)).select_by_value(value)

    def press(self, name: str) -> None:
        """Clicks the button of this name that is shown."""
        next(button for button in self.all("button") if button.is_displayed() and button.text == name).click()

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements of a selector that are shown, at one moment."""
        script = """return Array.from(document.querySelectorAll(arguments[0]))
            .filter((element) => element.checkVisibility())
            .map((element) => (element.innerText ?? element.textContent).trim())"""
        texts: list[str] = self.run(script, selector)
        return texts

    def wait_for(self, selector: str, text: str = "", timeout_s: float = WAIT_S) -> None:
        """Waits until an element is shown that has this text."""
        script = """return Array.from(document.querySelectorAll(arguments[0])).some((element) =>
            element.checkVisibility() && (element.innerText ?? element.textContent).includes(arguments[1]))"""
        self.wait_until(lambda: self.run(script, selector, text), f"{selector} with {text!r}", timeout_s)

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
        """Waits until a condition holds."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"{what} did not come about in {timeout_s} s; the page: {self.texts('body')}"
            time.sleep(0.05)

    def drain(self) -> None:
        """Takes in what the browser has logged since the last time."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.asked.append(message["params"]["request"]["url"])
        for entry in self.driver.get_log("browser"):
            if entry["level"] in ("SEVERE", "WARNING"):
                self._errors.append(entry["message"])

    def errors(self, *but: str) -> list[str]:
        """Errors and warnings in the page's console since it was opened, but for those that have one of these texts."""
        self.drain()
        return [error for error in self._errors if not any(text in error for text in but)]

    def hosts(self) -> set[str]:
        """Whom the page has asked, by host and port."""
        self.drain()
        return {urlsplit(url).netloc for url in self.asked if url.startswith("http")}

    def picture(self, path: Path, height: int | None = None) -> None:
        """Writes a picture of the page: of so many pixels from its top, or of the whole, however long it is."""
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser that is ready; the context ends it."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which(BROWSER) or BROWSER
    for option in _OPTIONS:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which(DRIVER)))
    try:
        driver.set_script_timeout(30)
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _NOTE_VIOLATIONS})
        yield Browser(driver)
    finally:
        driver.quit()
