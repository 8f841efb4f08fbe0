"""A browser, and a real stack for it to look at: one prefill and two decode workers with a tiny model, and gateways."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.console.browser import Browser, running_browser
from tests.e2e.conftest import write_model
from tests.e2e.stack import Gateway, Stack, running_stack
from tests.gateway.keys.key_files import KeySet, write_keys
from tests.machine import CHROMIUM, require

PLAIN = "a-plain-key"  # with all rights


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    require(CHROMIUM)
    with running_browser() as found:
        yield found


@pytest.fixture(scope="session")
def stack(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Tests leave it as they found it. It depends on the browser, without which nobody needs it."""
    model = write_model(tmp_path_factory.mktemp("llama"), "llama", max_position_embeddings=4096)
    with running_stack(model, prefill=1, decode=2) as running:
        yield running


@dataclass(frozen=True)
class Keyed:
    """A gateway that asks for keys, for the same workers."""

    gateway: Gateway
    keys: KeySet


@pytest.fixture(scope="session")
def keyed(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    keys = write_keys(Path(tmp_path_factory.mktemp("keys")) / "keys.json")
    options = ("--keys", str(keys.path), "--api-key", PLAIN, "--ttft-slo", "30")
    with replace(stack, key=PLAIN).serving(*options) as gateway:
        yield Keyed(gateway, keys)


def console(gateway: Gateway, page: str = "fleet") -> str:
    """The address of a page of the console at the admin port."""
    return f"http://127.0.0.1:{gateway.admin_port}/console/#/{page}"


def console_at_api(gateway: Gateway, page: str = "requests") -> str:
    """The same at the API's port, where tenants come."""
    return f"{gateway.url}/console/#/{page}"
