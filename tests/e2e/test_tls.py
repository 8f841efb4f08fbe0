"""Certificates that change under load, and `baton up --tls`."""

import contextlib
import os
import re
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest

from protos import inference_pb2, inference_pb2_grpc
from services.launcher.authority import Authority
from services.launcher.certificates import ROLES
from services.tls.roles import CertificateRole
from tests.certificates import Certificates
from tests.e2e.conftest import SecureUp, clear_prompt, generate
from tests.e2e.listening import is_own_port_of_worker, listeners_of
from tests.e2e.stack import Stack, wait_until, worker_ports
from tests.e2e.test_pair import GREEDY, text_of
from tests.machine import REDIS, needs
from tests.tls.test_redis import running as running_redis_with_tls

NUM_TOKENS = 12
NUM_CLIENTS = 3


@dataclass
class Load:
    """Clients that ask the same again and again, until told to stop."""

    stack: Stack
    prompt: list[int]
    answers: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.stopped.is_set():
            self.answers.append(self._ask())

    def _ask(self) -> str:
        completions = self.stack.gateway.client.completions
        stream = completions.create(prompt=self.prompt, max_tokens=NUM_TOKENS, stream=True, **GREEDY)
        return "".join(part.choices[0].text for part in stream if part.choices)

    def more(self) -> None:
        """Waits for answers to requests that began after this call."""
        wanted = len(self.answers) + 3 * NUM_CLIENTS
        wait_until(lambda: len(self.answers) >= wanted, 120, "further answers")


@contextlib.contextmanager
def under_load(stack: Stack, prompt: list[int]) -> Iterator[Load]:
    """Fails, in the end, where a client failed."""
    load = Load(stack, prompt)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(load.run) for _ in range(NUM_CLIENTS)]
        try:
            yield load
        finally:
            load.stopped.set()
    for client in clients:
        client.result()


def issue(authority: Authority, root: Path, trusted: bytes) -> None:
    """New certificates for all roles, in place of the older ones."""
    for role, names in ROLES.items():
        authority.issue([name.dns_name for name in names], root / role.value)
    trust(root, trusted)


def trust(root: Path, trusted: bytes) -> None:
    for role in ROLES:
        file = root / role.value / "ca.crt"
        (beside := file.with_suffix(".new")).write_bytes(trusted)
        beside.replace(file)


@pytest.mark.long
def test_certificates_and_authorities_change_under_load_and_nothing_is_lost(llama: Path, tmp_path: Path) -> None:
    """In the order that docs/run/tls.md names. At the end, workers that start anew have the new authority alone."""
    old, new = Authority("old"), Authority("new")
    issue(old, tmp_path, old.certificate)
    prompt = clear_prompt(llama, 83, 100, NUM_TOKENS)
    expected = text_of(llama, generate(llama, prompt, NUM_TOKENS).tokens)
    stack = Stack(llama, worker_ports(1, 2), ["--transport", "grpc"], None, mtls=tmp_path)
    with stack.running(), under_load(stack, prompt) as load:
        load.more()
        issue(old, tmp_path, old.certificate)
        load.more()
        trust(tmp_path, both := old.certificate + new.certificate)
        load.more()
        issue(new, tmp_path, both)
        load.more()
        trust(tmp_path, new.certificate)
        load.more()
        assert stack.gateway.metric("baton_handoffs_total", outcome="completed") > 0
        _, metrics = stack.gateway.get("/metrics")
        ends = dict(re.findall(r'^baton_attempt_ends_total\{reason="(\w+)"\} (\S+)', metrics, re.MULTILINE))
        assert [reason for reason, count in ends.items() if float(count)] == ["finished"]  # no attempt broke
        for name in stack.ports:
            stack.workers[name].kill()
            stack.start(name)
            stack.gateway.wait_for_workers(len(stack.ports))
            load.more()
    assert {answer.rstrip("\ufffd") for answer in load.answers} == {expected}


@needs(REDIS)
def test_gateway_and_workers_meet_in_a_redis_that_asks_for_certificates(llama: Path, tmp_path: Path) -> None:
    """With those of --mtls: neither the URL nor the environment names files."""
    authority = Authority()
    issue(authority, tmp_path, authority.certificate)
    prompt = clear_prompt(llama, 89, 100, NUM_TOKENS)
    with running_redis_with_tls(Certificates(authority, tmp_path), tmp_path) as server:
        url = f"rediss://127.0.0.1:{server.port}"
        stack = Stack(llama, worker_ports(1, 1), ["--transport", "grpc"], url, mtls=tmp_path)
        with stack.running():
            answer = stack.gateway.client.completions.create(prompt=prompt, max_tokens=NUM_TOKENS, **GREEDY)
    expected = text_of(llama, generate(llama, prompt, NUM_TOKENS).tokens)
    assert answer.choices[0].text.rstrip("\ufffd") == expected


def test_clients_speak_tls_by_the_authority_of_the_run(secure: SecureUp) -> None:
    up, key = secure.up, secure.keys.acme
    assert up.url.startswith("https://127.0.0.1:")
    context = ssl.create_default_context(cafile=up.ca_file)
    with openai.OpenAI(base_url=up.url, api_key=key, http_client=httpx2.Client(verify=context)) as client:
        answer = client.completions.create(model="tiny", prompt=list(range(20, 120)), max_tokens=8)
        assert answer.choices[0].finish_reason == "length"
    credentials = grpc.ssl_channel_credentials(up.ca_file.read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{up.grpc_port}", credentials) as channel:
        request = inference_pb2.GenerateRequest(text="Hello", max_tokens=4, ignore_eos=True)
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert list(stub.Generate(request, timeout=120, metadata=[("x-api-key", key)]))
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{up.url}/models")
    plain = httpx2.get(f"{up.url}/models".replace("https", "http"))
    assert plain.status_code == 400
    assert plain.json()["error"]["message"].startswith("This port speaks TLS")


def test_keys_are_this_user_s_alone(secure: SecureUp) -> None:
    up = secure.up
    files = [path for path in up.ca_file.parent.rglob("*") if path.name == "tls.key"]
    assert len(files) == 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(up.ca_file.parent.stat().st_mode) == 0o700


def test_workers_refuse_certificates_of_another_authority(secure: SecureUp, tmp_path: Path) -> None:
    """What they say to plain text, and to a client without a certificate, is in test_ports.py."""
    up, stranger = secure.up, Authority().issue([CertificateRole.GATEWAY.dns_name], tmp_path)
    key, chain = stranger.key.read_bytes(), stranger.chain.read_bytes()
    credentials = grpc.ssl_channel_credentials(up.ca_file.read_bytes(), key, chain)
    name = ("grpc.ssl_target_name_override", CertificateRole.WORKER.dns_name)
    workers = [each for each in listeners_of(up.process.pid) if is_own_port_of_worker(each)]
    assert len(workers) == 2
    for port in (each.port for each in workers):
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=[name]) as channel:
            check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.RpcError):
                check(b"", timeout=60)


@pytest.mark.long
def test_restart_replaces_everything_with_tls(secure: SecureUp) -> None:
    """It was started with certificates, and asks with one."""
    up = secure.up
    command = [sys.executable, "-m", "services.cli", "restart", "--port", str(up.port)]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(up.ca_file.parent.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.count("is replaced")) == (0, 3), done.stderr
    test_clients_speak_tls_by_the_authority_of_the_run(secure)
