"""What befalls one member of a running `baton up`, its program, its certificate or its keys file, reaches no other."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from services.config import Right
from services.gateway.keys.changes import add_key, revoke_key
from services.gateway.keys.key_entry import RateLimits
from services.launcher.authority import Authority
from services.tls.roles import CertificateRole
from tests.certificates import Certificates
from tests.e2e.stack import Endpoint, wait_until
from tests.faults.case import Case
from tests.faults.rows import long, row
from tests.faults.up import UpStack

_AWAY_S = 3.0
_ROLES = tuple(CertificateRole)


@dataclass
class Members(UpStack):
    """A `baton up` with certificates between its processes, keys, and an interpreter that can be taken away."""

    certificates: Certificates | None = None
    keys: Path = Path()


def own_python(directory: Path) -> Path:
    """This interpreter with its packages, at a path of its own."""
    (directory / "bin").mkdir(parents=True)
    python = directory / "bin" / "python"
    python.symlink_to(Path(sys.executable).resolve())
    prefix = Path(sys.prefix)
    if (prefix / "pyvenv.cfg").exists():
        (directory / "pyvenv.cfg").write_bytes((prefix / "pyvenv.cfg").read_bytes())
    (directory / "lib").symlink_to(prefix / "lib")
    return python


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    root = tmp_path_factory.mktemp("members")
    (root / "certificates").mkdir()
    certificates, keys = Certificates(Authority(), root / "certificates"), root / "keys.json"
    mtls = certificates.paths(*_ROLES, directory="mtls").chain.parent
    _, key = add_key(keys, "acme", [Right.API, Right.ADMIN], 0, RateLimits())
    options = ("--mtls", str(mtls), "--keys", str(keys))
    python = str(own_python(root / "python"))
    with (made := Members(model, root, Endpoint(key), options, python, certificates, keys)).running():
        yield made


@long
@row(65)
def test_a_child_whose_program_is_away_is_started_when_it_is_back(stack: Members, case: Case):
    before, killed, python = stack.children(), stack.child("decode"), Path(stack.python)
    others = before - {killed.pid}
    case.stream(4)
    case.fault()
    python.rename(python.with_name("away"))
    killed.send_signal(signal.SIGKILL)
    time.sleep(_AWAY_S)
    assert others <= stack.children()
    python.with_name("away").rename(python)
    case.settle()
    assert others <= stack.children()
    assert len(stack.children()) == len(before)


@long
@row(66)
def test_a_certificate_that_tls_cannot_use_keeps_the_older_one_in_use(stack: Members, case: Case):
    """A decode worker that dies meanwhile comes back when the certificate can be used."""
    assert stack.certificates is not None
    killed = stack.child("decode")
    others = stack.children() - {killed.pid}
    case.stream(4)
    case.fault()
    stack.certificates.odd_paths(*_ROLES, directory="mtls", key=ec.generate_private_key(ec.SECP256K1()))
    killed.send_signal(signal.SIGKILL)
    for client in case.ask(case.prompts(4)):
        client.join(60)
    assert others <= stack.children()
    assert stack.gateway.metric("baton_files_refused_seconds", files="mtls") > 0
    stack.certificates.paths(*_ROLES, directory="mtls")
    case.settle()
    assert others <= stack.children()


@long
@row(67)
def test_a_key_that_is_revoked_while_descriptors_are_out_opens_nothing_afterwards(stack: Members, case: Case):
    id, key = add_key(stack.keys, "acme", [Right.API], 0, RateLimits())
    gateway = stack.child("gateway")
    with openai.OpenAI(base_url=f"{stack.gateway.url}/v1", api_key=key, max_retries=0) as client:
        opens = _opener(client)
        wait_until(opens, 30, "the new key")
        case.stream(4)
        case.fault()
        limits = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        revoke_key(stack.keys, id)
        time.sleep(_AWAY_S)
        resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, limits)
        took_s = wait_until(lambda: not opens(), 30, "the end of the revoked key")
        print(f"the revoked key opened for {took_s:.1f} s after there were descriptors again")
    case.settle()
    assert stack.gateway.metric("baton_files_refused_seconds", files="keys") == 0
    assert gateway.is_running()


def _opener(client: openai.OpenAI) -> Callable[[], bool]:
    def opens() -> bool:
        try:
            client.models.list()
        except openai.AuthenticationError:
            return False
        return True

    return opens


@long
@row(67)
def test_a_pipe_in_the_place_of_the_keys_file_holds_no_gateway_up(stack: Members):
    """It answers, and SIGTERM ends it. None starts before there is a file again."""
    content, gateway = stack.keys.read_bytes(), stack.child("gateway")
    stack.keys.unlink()
    os.mkfifo(stack.keys, 0o600)
    wait_until(lambda: stack.gateway.metric("baton_files_refused_seconds", files="keys") > 0, 30, "the refusal")
    gateway.terminate()
    gateway.wait(30)
    stack.keys.unlink()
    stack.keys.write_bytes(content)
    stack.keys.chmod(0o600)
    stack.heal()
