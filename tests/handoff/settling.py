"""Lets a world come to rest, and says what must be true then."""

from services.protocol.outcomes import FinishReason
from tests.handoff.processes import Violation
from tests.handoff.world import World

_PATIENCE_S = 100.0  # of the world's clock; far below the deadline of a patient client
_PATIENCE_WITHOUT_FAULTS_S = 2.0  # nothing waits for a grace then
_AFTERWARDS_S = (4.0, 4.0, 4.0)  # beyond every grace, and what follows from its end


def run_fairly(world: World, rounds: int = 1) -> bool:
    """Everything that can go on goes on once, in order; False when nothing could."""
    moved = False
    for _ in range(rounds):
        moved = False
        for kind in ("deliver", "land", "end read"):
            while things := world.things(kind):
                things[0]()
                moved = True
        for worker in list(world.workers.values()):
            moved |= world.step(worker)
        if not moved:
            break
    return moved


def heal(world: World) -> None:
    """Every end notices what broke, the dead are known as dead, everybody connects."""
    while things := world.things("notice"):
        things[0]()
    for worker in list(world.workers.values()):
        world.prove_dead(worker)
    world.connect()


def settle(world: World, *, must_complete: bool = False) -> None:
    """No more faults: every request ends, once, and nothing is held after it. Raises Violation."""
    heal(world)
    until = world.now + (_PATIENCE_WITHOUT_FAULTS_S if must_complete else _PATIENCE_S)
    while True:
        while run_fairly(world):
            pass
        waiting = [client for gateway in world.gateways for client in gateway.open_clients()]
        if not waiting:
            break
        if world.now > until:
            raise Violation(f"no end for {[client.ask for client in waiting]}")
        world.advance(1.0)
    _check_ends(world, must_complete)
    for seconds in _AFTERWARDS_S:
        world.advance(seconds)
        while run_fairly(world):
            pass
    _check_nothing_is_held(world)


def _check_ends(world: World, must_complete: bool) -> None:
    for gateway in world.gateways:
        if len(gateway.ledger):
            raise Violation("the ledger has rows without a client")
        for client in gateway.clients:
            failed = client.entry.error() is not None
            if failed and (client.finished or client.entry.finish is not FinishReason.NONE):
                raise Violation(f"{client.ask} ended twice")
            if must_complete and tuple(client.got) != client.ask.expected():
                raise Violation(f"{client.ask} got {client.got} though nothing broke: {client.entry.error()}")


def _check_nothing_is_held(world: World) -> None:
    if world.flights:
        raise Violation("reads without an end")
    for worker in world.workers.values():
        sequences = worker.core.engine.sequences
        if worker.core.open_ids or worker.core.has_leases or worker.core.has_open_reads:
            raise Violation(f"{worker} still knows {worker.core.open_ids or 'early opens'} after all requests ended")
        if sequences.pool.available != sequences.pool.num_blocks or sequences.tables.num_quarantined:
            raise Violation(f"{worker}: {sequences.pool.available} of {sequences.pool.num_blocks} blocks are back")
