"""What a gateway remembers of its own prompts."""

from kvtransfer.ids import WorkerId
from services.prefix_index.recent import RecentPrefixes
from tests.prefix_index.test_redis_index import chain_of

ALICE, BOB = WorkerId(1), WorkerId(2)


def test_it_knows_what_was_sent_where():
    recent, chain = RecentPrefixes(), chain_of(9)
    recent.note(ALICE, chain[:6])
    recent.note(BOB, chain[:2])
    assert recent.depths(chain) == {ALICE: 6, BOB: 2}
    assert recent.depths(chain_of(9, seed=100)) == {}
    recent.remove_worker(ALICE)
    assert recent.depths(chain) == {BOB: 2}


def test_what_is_used_stays_and_a_chain_is_forgotten_from_its_end():
    recent, old, used, new = RecentPrefixes(max_blocks=10), chain_of(4), chain_of(4, seed=100), chain_of(4, seed=200)
    for chain in (used, old, used, new):
        recent.note(ALICE, chain)
    assert [recent.depths(chain).get(ALICE, 0) for chain in (old, used, new)] == [2, 4, 4]
