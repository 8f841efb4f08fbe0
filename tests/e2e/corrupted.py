"""A decode worker that damages the KV of some blocks after it has read and checked them, as no worker does."""

from kvtransfer.transports.nixl import NixlTransport, _OpenRead


def corrupt_reads(first: int, end: int) -> None:
    """From now on, blocks [first, end) of whatever one read brings hold what the blocks after them hold."""
    finish = NixlTransport._finish

    def damaging(self: NixlTransport, open_read: _OpenRead) -> None:
        blocks, pool = open_read.read.destination, self._pool
        if len(blocks) >= 2 * end - first:
            num_bytes = (end - first) * pool.block_bytes
            others = pool.read(blocks[end : 2 * end - first], 0, num_bytes)
            pool.write(blocks[first:end], 0, others)
        finish(self, open_read)

    NixlTransport._finish = damaging  # type: ignore[method-assign]
