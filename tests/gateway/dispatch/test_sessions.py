"""Sessions: requests of one go to the worker that served it last."""

from dataclasses import replace

from kvtransfer.ids import WorkerId
from services.config import HandoffMode
from services.gateway.dispatch.sessions import Sessions
from services.protocol.block_hash import block_hashes, root_hash
from services.protocol.capabilities import CACHE_SALT
from services.protocol.capsule import Capsule
from services.protocol.contents import Namespace
from tests.gateway.dispatch_stack import DECODE, OTHER_DECODE, PROMPT, decode_worker, eventually, request, running


async def test_requests_of_a_session_go_to_one_worker_and_others_take_turns():
    workers = decode_worker(), decode_worker(OTHER_DECODE)
    async with running(*workers, handoff=HandoffMode.NEVER) as stack:

        async def place(session: str) -> int:
            before = [len(worker.submits) for worker in workers]
            async with stack.dispatcher.generate(replace(request(), session_id=session)):
                await eventually(lambda: [len(worker.submits) for worker in workers] != before)
            return next(at for at, worker in enumerate(workers) if len(worker.submits) > before[at])

        assert len({await place("mine") for _ in range(6)}) == 1
        assert len({await place("") for _ in range(6)}) == 2


def test_the_sessions_that_were_served_longest_ago_are_removed():
    sessions = Sessions(max_sessions=2)
    for name in ("a", "b", "a", "c"):
        sessions.note(("tenant", name), WorkerId(DECODE))
    assert sessions.worker_of(("tenant", "a")) == DECODE
    assert sessions.worker_of(("tenant", "b")) is None
    assert sessions.worker_of(("other", "a")) is None


async def test_a_salted_prompt_is_found_by_its_salt_alone_and_goes_to_workers_that_know_salts():
    old, new = decode_worker(), decode_worker(OTHER_DECODE, knows=frozenset({CACHE_SALT}))
    async with running(old, new, handoff=HandoffMode.NEVER) as stack:
        plain = request()
        salted = replace(plain, capsules=tuple(replace(capsule, cache_salt="s") for capsule in plain.capsules))
        for _ in range(3):
            async with stack.dispatcher.generate(salted):
                pass
        await eventually(lambda: len(new.submits) == 3)
        assert not old.submits
        assert {submit.capsule.cache_salt for submit in new.submits} == {"s"}


def test_capsules_say_what_they_need():
    capsule: Capsule = request().capsules[0]
    assert replace(capsule, cache_salt="s").needs == {CACHE_SALT}
    hashes = {salt: block_hashes(root_hash("f", Namespace(salt)), capsule.token_ids, 4) for salt in ("", "s")}
    assert len(PROMPT) >= 4
    assert not set(hashes[""]) & set(hashes["s"])
