"""The handoff benchmark between two real worker processes, small."""

from loadtest.micro import handoff


async def test_every_moment_of_a_handoff_is_noted() -> None:
    found = await handoff.handoffs(max_num_batched_tokens=32, sizes=[1, 5], rounds=2)
    assert {blocks: len(moments) for blocks, moments in found.items()} == {1: 2, 5: 2}
    for moments in found.values():
        for ready, read, gap in moments:
            assert 0 < read < ready < gap + 1
