"""Whole stacks whose gateways ask for keys: what tenants share, and where keys can be seen."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest

from services.config import API_KEY_VARIABLE
from tests.e2e.conftest import prompt_of
from tests.e2e.stack import Endpoint, Stack, wait_until, worker_ports
from tests.e2e.test_pair import GREEDY
from tests.gateway.keys.key_files import KeySet, write_keys
from tests.redis_server import running_redis

PLAIN = "a-plain-key"
LENGTH, BLOCK_SIZE = 100, 16
CACHED = LENGTH // BLOCK_SIZE * BLOCK_SIZE


@dataclass
class Keyed:
    """A pair and a gateway that asks for keys."""

    stack: Stack
    keys: KeySet
    options: tuple[str, ...]


@pytest.fixture(scope="module")
def keyed(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    directory = tmp_path_factory.mktemp("keyed")
    keys = write_keys(directory / "keys.json")
    options = ("--keys", str(keys.path), "--api-key", PLAIN)
    with running_redis(directory) as server:
        stack = Stack(llama, worker_ports(1, 1), [], server.url, key=PLAIN)
        with stack.running(*options):
            yield Keyed(stack, keys, options)


def cached_tokens(gateway: Endpoint, key: str, prompt: list[int], **fields: str) -> int:
    """The prompt's tokens that some cache had, as the client is told."""
    greedy = {**GREEDY, "extra_body": GREEDY["extra_body"] | fields}
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
        usage = client.completions.create(prompt=prompt, max_tokens=4, **greedy).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


@pytest.mark.long
def test_a_tenant_finds_its_own_prefixes_and_nobody_else_s(keyed: Keyed):
    gateway, keys, prompt = keyed.stack.gateway, keyed.keys, prompt_of(801, LENGTH)
    assert [cached_tokens(gateway, keys.acme, prompt) for _ in range(2)] == [0, CACHED]
    for stranger in (keys.other, keys.patient, PLAIN):
        assert [cached_tokens(gateway, stranger, prompt) for _ in range(2)] == [0, CACHED]


def computed_tokens(gateway: Endpoint, key: str, prompt: list[int]) -> int:
    """The tokens that workers computed for a prompt and the one token of its answer: what of its time is work."""
    gateway.wait_for_baseline()
    before = gateway.metric("baton_worker_computed_tokens")
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
        client.completions.create(prompt=prompt, max_tokens=1, **GREEDY)
    wait_until(lambda: gateway.metric("baton_worker_computed_tokens") > before, what="the worker's word of its work")
    return int(gateway.metric("baton_worker_computed_tokens") - before)


def test_a_tenant_s_prompt_costs_as_much_work_as_if_no_other_tenant_had_sent_it(keyed: Keyed):
    """So no clock tells a tenant what another one asked."""
    gateway, keys, prompt = keyed.stack.gateway, keyed.keys, prompt_of(806, LENGTH)
    assert [computed_tokens(gateway, keys.acme, prompt) for _ in range(2)] == [LENGTH, LENGTH - CACHED]
    for stranger in (keys.other, keys.patient, PLAIN):
        assert [computed_tokens(gateway, stranger, prompt) for _ in range(2)] == [LENGTH, LENGTH - CACHED]


def test_a_client_s_own_salt_divides_its_tenant_s_caches_and_opens_no_other_s(keyed: Keyed):
    gateway, keys, prompt = keyed.stack.gateway, keyed.keys, prompt_of(802, LENGTH)
    assert [cached_tokens(gateway, keys.acme, prompt, cache_salt="a") for _ in range(2)] == [0, CACHED]
    assert cached_tokens(gateway, keys.acme, prompt) == 0
    assert cached_tokens(gateway, keys.acme, prompt, cache_salt="b") == 0
    assert cached_tokens(gateway, keys.other, prompt, cache_salt="a") == 0


@pytest.mark.long
def test_gateways_with_the_same_file_find_each_other_s_prefixes_by_tenant(keyed: Keyed):
    keys, prompt = keyed.keys, prompt_of(803, LENGTH)
    assert cached_tokens(keyed.stack.gateway, keys.acme, prompt) == 0
    with keyed.stack.serving(*keyed.options) as second:
        assert cached_tokens(second, keys.other, prompt) == 0
        assert second.metric("baton_cached_tokens_predicted_total") == 0
        assert cached_tokens(second, keys.acme, prompt) == CACHED
        assert second.metric("baton_cached_tokens_predicted_total") == CACHED


@pytest.mark.long
def test_a_gateway_without_keys_finds_no_tenant_s_prefixes(keyed: Keyed):
    prompt = prompt_of(804, LENGTH)
    assert cached_tokens(keyed.stack.gateway, keyed.keys.acme, prompt) == 0
    with keyed.stack.serving() as keyless:
        assert cached_tokens(keyless, "none", prompt) == 0


@pytest.mark.long
def test_keys_are_in_no_log_line_and_no_command_line_of_a_whole_run(llama: Path, tmp_path: Path):
    """Of `baton up` with keys of both kinds, through requests with good and bad keys and a restart of all processes."""
    keys, gateway = write_keys(tmp_path / "keys.json"), Endpoint(PLAIN)
    log = tmp_path / "log"
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), API_KEY_VARIABLE: PLAIN}
    command = [sys.executable, "-m", "services.cli"]
    options = ["--model", str(llama), "--served-model-name", "tiny", "--keys", str(keys.path), *gateway.options]
    options += ["--device", "cpu", "--kv-memory", "16MiB", "--num-threads", "1", "--log-format", "json"]
    with log.open("wb") as output, gateway.client:
        up = subprocess.Popen([*command, "up", *options], env=environment, stdout=output, stderr=output)
        try:
            wait_until((tmp_path / "baton" / f"{gateway.port}.sock").exists, 240, "the socket for commands")
            gateway.wait_for_workers(2)
            assert cached_tokens(gateway, keys.acme, prompt_of(805, LENGTH)) == 0
            stranger = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="a-wrong-key", max_retries=0)
            with stranger, pytest.raises(openai.AuthenticationError):
                stranger.models.list()
            processes = psutil.Process(up.pid).children(recursive=True)
            lines = [" ".join(process.cmdline()) for process in processes]
            of_workers = [str(process.environ()) for process in processes if "gateway" not in process.cmdline()]
            shown = "".join(gateway.get(path)[1] for path in ("/debug/ledger", "/debug/requests", "/metrics"))
            restart = [*command, "restart", "--port", str(gateway.port)]
            said = subprocess.run(restart, env=environment, capture_output=True, text=True, timeout=240)
            assert (said.returncode, len(said.stdout.splitlines())) == (0, 3)
            assert cached_tokens(gateway, keys.other, prompt_of(805, LENGTH)) == 0
        finally:
            up.send_signal(signal.SIGTERM)
            assert up.wait(60) == 0
    logged = log.read_text()
    assert '"key_id"' in logged
    for secret in (*keys.secrets, PLAIN, "a-wrong-key"):
        for text in (logged, shown, said.stdout, said.stderr, *lines, *of_workers):
            assert secret not in text
