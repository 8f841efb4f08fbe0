"""Files that are wrong for a moment: what was in use stays, the reason is logged once, and they are tried again."""

import asyncio
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.files import followed
from services.launcher.authority import Authority
from tests.certificates import Certificates
from tests.failures import FAILURES, failing
from tests.files.subjects import SUBJECTS, Subject, subjects

NOBODY = 65534
LOOKS = 2
RETRY_S = 0.001

Mend = Callable[[], object]
Trouble = Callable[[Path, bytes], Mend]  # makes a file wrong that is to have this content; returns what mends it


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory into which every user may look."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def subject(request: pytest.FixtureRequest, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setattr(followed, "RETRY_S", RETRY_S)
    return subjects(Certificates(Authority(), directory), Authority().certificate, directory)[request.param]()


def replace(file: Path, content: bytes, mode: int = 0o600) -> None:
    """As a careful program does it: another file, in one step."""
    beside = file.with_name("beside")
    beside.write_bytes(content)
    beside.chmod(mode)
    beside.replace(file)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Looks as a user without rights. Who runs the tests may be root, who may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def give(path: Path, user: int) -> None:
    """Gives a file away, where this user may do that."""
    if os.geteuid() == 0:
        os.chown(path, user, -1)


def readable_a_moment_later(file: Path, newer: bytes) -> Mend:
    replace(file, newer, mode=0)
    give(file, NOBODY)
    return lambda: file.chmod(0o600)


def given_a_moment_later(file: Path, newer: bytes) -> Mend:
    replace(file, newer)
    return lambda: give(file, NOBODY)


def no_file(make: Callable[[Path], object]) -> Trouble:
    """Something else in its place."""

    def trouble(file: Path, newer: bytes) -> Mend:
        file.unlink()
        make(file)

        def mend() -> None:
            if file.is_dir():
                file.rmdir()
            replace(file, newer)

        return mend

    return trouble


def dangling_link(file: Path, newer: bytes) -> Mend:
    target = file.with_name("target")
    file.unlink()
    file.symlink_to(target)
    return lambda: replace(target, newer)


def half_written(file: Path, newer: bytes) -> Mend:
    end = len(newer) - 100
    replace(file, newer[:end])

    def mend() -> None:
        with file.open("ab") as half:
            half.write(newer[end:])

    return mend


def garbage(file: Path, newer: bytes) -> Mend:
    replace(file, b"\xff\x00garbage" * 100)
    return lambda: replace(file, newer)


def no_descriptor(file: Path, newer: bytes) -> Mend:
    """No file changes when there are descriptors again."""
    replace(file, newer)
    lowest = os.dup(0)
    os.close(lowest)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)


AS_NOBODY = {"readable a moment later": readable_a_moment_later}
if os.geteuid() == 0:
    AS_NOBODY["given a moment later"] = given_a_moment_later
TROUBLES: dict[str, Trouble] = {
    **AS_NOBODY,
    "a pipe": no_file(os.mkfifo),
    "a directory": no_file(os.mkdir),
    "gone": no_file(lambda path: None),
    "a dangling link": dangling_link,
    "half written": half_written,
    "garbage": garbage,
    "no descriptor left": no_descriptor,
}


async def until_newer(subject: Subject) -> None:
    async with asyncio.timeout(300):
        while not await subject.uses_newer():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("subject", SUBJECTS, indirect=True)
async def test_files_that_are_wrong_for_a_moment_are_refused_once_and_tried_again(
    subject: Subject, trouble: str, directory: Path
) -> None:
    await asyncio.to_thread(lambda: None)  # the loop has its thread before descriptors are out
    looking: Callable[[], AbstractContextManager[None]] = as_nobody if trouble in AS_NOBODY else nullcontext
    if trouble in AS_NOBODY:
        for path in directory.rglob("*"):
            give(path, NOBODY)
    with capture_logs() as logs:
        mend = TROUBLES[trouble](subject.file, subject.newer())
        try:
            with looking():
                for _ in range(LOOKS):
                    assert not await asyncio.wait_for(subject.uses_newer(), 300)
                    await asyncio.sleep(2 * RETRY_S)
        finally:
            mend()
        assert [line["log_level"] for line in logs] == ["error"], logs
        with looking():
            await until_newer(subject)
    assert [line["log_level"] for line in logs] == ["error", "info"], logs


SEAMS = {  # what fails, by the subjects that use it
    "os.open": SUBJECTS,
    "os.fstat": SUBJECTS,
    "os.memfd_create": ("mtls", "tls", "redis"),
    "ssl.SSLContext.load_cert_chain": ("mtls", "tls", "redis"),
    "ssl.SSLContext.load_verify_locations": ("mtls", "redis"),
    "ssl.SSLContext.wrap_bio": ("mtls", "tls", "redis"),
    "services.gateway.keys.file._Content.model_validate_json": ("keys",),
    "services.gateway.keys.authentication.tenant_salt": ("keys",),
}


@pytest.mark.parametrize(
    ("subject", "seam"), [(name, seam) for seam, names in SEAMS.items() for name in names], indirect=["subject"]
)
async def test_whatever_fails_while_files_are_taken_is_a_refusal(subject: Subject, seam: str) -> None:
    replace(subject.file, subject.newer())
    with capture_logs() as logs:
        for failure in FAILURES:
            with failing(seam, failure):
                for _ in range(LOOKS):
                    assert not await subject.uses_newer()
                    await asyncio.sleep(2 * RETRY_S)
        await until_newer(subject)
    assert [line["log_level"] for line in logs] == ["error"] * len(FAILURES) + ["info"], logs


@pytest.mark.parametrize("subject", ["mtls", "tls", "keys"], indirect=True)
async def test_another_content_of_equal_size_and_time_is_seen(subject: Subject) -> None:
    """Also within one tick of the clock that the system gives files their times by."""
    first, newer = subject.file.read_bytes(), subject.newer()
    size = max(len(first), len(newer)) + 1
    subject.file.write_bytes(first.ljust(size, b"\n"))
    before = subject.file.stat()
    assert not await subject.uses_newer()
    subject.file.write_bytes(newer.ljust(size, b"\n"))
    os.utime(subject.file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert await subject.uses_newer()


@pytest.mark.parametrize("subject", SUBJECTS, indirect=True)
async def test_the_same_content_in_another_file_is_no_news(subject: Subject) -> None:
    with capture_logs() as logs:
        replace(subject.file, subject.file.read_bytes())
        for _ in range(LOOKS):
            assert not await subject.uses_newer()
    assert logs == []


def test_nothing_is_read_again_that_has_not_changed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = directory / "file"
    file.write_bytes(b"content")
    files = followed.FollowedFiles([file], lambda contents, _: contents[0].data, followed.FileRefused, "refused")
    monkeypatch.setattr(followed, "_CLOCK_TICK_NS", 0)
    files.look()
    monkeypatch.setattr(os, "open", None)  # which would fail
    for _ in range(LOOKS):
        assert not files.look()
    assert files.refused_s() == 0.0


def test_files_that_belong_together_are_taken_together(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is replaced while the other is read: neither is taken before both can be."""
    monkeypatch.setattr(followed, "RETRY_S", 0.0)
    first, second = directory / "first", directory / "second"
    for file in (first, second):
        file.write_bytes(b"1")
    files = followed.FollowedFiles(
        [first, second], lambda contents, _: [content.data for content in contents], followed.FileRefused, "refused"
    )
    read = followed.read_file

    def read_and_replace(path: Path, error: type[followed.FileRefused]) -> followed.FileContent:
        content = read(path, error)
        if path == second:
            replace(first, b"2")
        return content

    replace(second, b"2")
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(followed, "read_file", read_and_replace)
        assert not files.look()
    assert files.value == [b"1", b"1"]
    assert files.refused_s() > 0.0
    assert files.look()
    assert files.value == [b"2", b"2"]


def test_a_file_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setattr(followed, "MAX_BYTES", 10)
    (directory / "file").write_bytes(bytes(11))
    with pytest.raises(followed.FileRefused, match="larger than 10 bytes"):
        followed.read_file(directory / "file")
    with pytest.raises(followed.FileRefused, match="it is no file"):
        followed.read_file(Path("/dev/zero"))
