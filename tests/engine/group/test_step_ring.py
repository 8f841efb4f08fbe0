import random
from hashlib import sha256
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

import pytest

from services.engine.runner.group.shared_pages import SharedPages
from services.engine.runner.group.step_ring import StepRing
from tests.forkserver import FORKSERVER

LONGEST = 3000
NUM_MESSAGES = 2000
END = b"end"


class NeverDoneError(Exception):
    pass


def a_message(rng: random.Random) -> list[bytes]:
    return [rng.randbytes(rng.choice([0, 1, 7, 8, 9, 100, LONGEST // 2])) for _ in range(2)]


@pytest.mark.parametrize("num_readers", [1, 3])
def test_readers_in_other_processes_get_each_message_whole_and_in_order(num_readers: int):
    ring = StepRing.create(num_readers, LONGEST)
    ends = [reading(ring, reader) for reader in range(num_readers)]
    rng, digest = random.Random(0), sha256()
    for _ in range(NUM_MESSAGES):  # many times around the ring, and more than it holds at once
        parts = a_message(rng)
        digest.update(b"".join(parts) + b"|")
        ring.send(parts)
    ring.send([END])
    ring.wait_done(lambda: None)
    for end in ends:
        assert end.poll(0), "a reader that has done everything has sent what it got before"
        assert end.recv() == digest.hexdigest()


def test_a_writer_does_not_wait_for_ever_for_a_reader_that_is_lost():
    ring = StepRing.create(1, LONGEST)
    ring.send([b"nobody reads this"])
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 300:
            raise NeverDoneError

    with pytest.raises(NeverDoneError):
        ring.wait_done(check)


def test_a_message_as_long_as_was_said_fits_twice():
    ring = StepRing.create(1, LONGEST)
    reader = StepRing(ring.pages, 0)
    for _ in range(20):
        ring.send([b"x" * LONGEST])
        ring.send([b"y" * LONGEST])
        assert reader.receive() == b"x" * LONGEST
        assert reader.receive() == b"y" * LONGEST


def reading(ring: StepRing, reader: int) -> Connection:
    ours, theirs = FORKSERVER.Pipe(duplex=False)
    FORKSERVER.Process(target=_read, args=(DupFd(ring.pages.file), reader, theirs), daemon=True).start()
    return ours


def _read(file: Any, reader: int, pipe: Connection) -> None:
    ring, digest = StepRing(SharedPages(file.detach()), reader), sha256()
    while (message := ring.receive()) != END:
        digest.update(message + b"|")
        ring.done()
    pipe.send(digest.hexdigest())
    ring.done()
