"""Directed schedules: for each planted bug, the order of events in which it shows.

They pass on the shipped classes, and end with a world at rest. Most of their worlds do not look inside the workers:
what shows a bug is what a client or an operator would see.
"""

from services.config import WorkerRole
from tests.handoff.processes import Ask, Parts, Sizes, Violation, WorkerProcess
from tests.handoff.settling import settle
from tests.handoff.wires import Break, ControlStream, GatewayStream, Stream
from tests.handoff.world import World

LONG = (1, 2, 3, 4, 5, 6, 7, 8, 9)  # five blocks


def pair(parts: Parts, sizes: Sizes | None = None, *, looks_inside: bool = False) -> World:
    """One prefill and one decode worker, connected, hellos delivered."""
    world = World(("prefill", "decode"), parts=parts, sizes=sizes, looks_inside=looks_inside)
    deliver(world)
    return world


def deliver(world: World, *streams: Stream) -> None:
    """Delivers all messages, or all of these streams, and what follows from them."""
    while True:
        ready = [stream for stream in streams or world.streams if stream.down_open and stream.down]
        answers = [stream for stream in streams or world.streams if stream.up_open and stream.up]
        if not ready and not answers:
            return
        for stream in ready:
            world.deliver_down(stream)
        for stream in answers:
            world.deliver_up(stream)


def control_stream(world: World) -> ControlStream:
    """The living one."""
    return world.control_streams()[-1]


def gateway_stream(world: World, name: str) -> GatewayStream:
    """The first gateway's living stream to a worker."""
    return world.gateways[0].workers[world.workers[name].worker_id]


def compute(world: World, worker: WorkerProcess) -> None:
    """Steps until there is nothing to compute."""
    while world.step(worker):
        pass


def post_reads(world: World) -> None:
    """What was asked comes as far as posted reads, of which nothing landed."""
    deliver(world)
    compute(world, world.workers["prefill"])
    deliver(world, control_stream(world))
    compute(world, world.workers["decode"])
    assert world.flights
    assert not any(flight.landed for flight in world.flights)


def land_all(world: World) -> None:
    """All data lands, and its readers hear of it."""
    for flight in list(world.flights):
        while not flight.has_data:
            world.land(flight)
        world.end_read(flight)


def source_is_reused_before_a_read(parts: Parts) -> None:
    """The producer loses a stream that its consumer thinks is alive, and gives the blocks to another prompt."""
    world = pair(parts)
    world.ask(Ask(LONG, 4))
    post_reads(world)
    prefill, decode = world.workers["prefill"], world.workers["decode"]
    world.break_stream(control_stream(world), Break.FAR)
    world.advance(3.5)
    world.step(prefill)
    world.ask(Ask(tuple(range(100, 113)), 1))
    to_prefill = gateway_stream(world, "prefill")
    while to_prefill.down:
        world.deliver_down(to_prefill)  # and nothing back: the gateway does not know yet
    compute(world, prefill)
    land_all(world)
    compute(world, decode)
    settle(world)


def data_lands_after_its_request_ended(parts: Parts) -> None:
    """A client leaves while its KV is being read; another one is served; then the data lands."""
    world = pair(parts)
    gone = world.ask(Ask(LONG, 4))
    post_reads(world)
    decode = world.workers["decode"]
    world.leave(world.gateways[0], gone)
    world.ask(Ask((50, 51, 52), 4, alone=True))
    deliver(world)
    world.step(decode)
    world.step(decode)
    land_all(world)
    compute(world, decode)
    settle(world)


def data_lands_after_its_producer_was_lost(parts: Parts) -> None:
    """A firewall cuts a living producer off while its KV is being read; another prompt is served; then data lands."""
    world = pair(parts)
    world.ask(Ask(LONG, 4))
    post_reads(world)
    prefill, decode, control = world.workers["prefill"], world.workers["decode"], control_stream(world)
    world.break_stream(control, Break.CUT)
    world.notice_near(control)
    world.lose(decode, prefill)
    world.ask(Ask((50, 51, 52), 4, alone=True))
    deliver(world, gateway_stream(world, "decode"))
    world.step(decode)
    world.step(decode)
    land_all(world)
    compute(world, decode)
    settle(world)


def a_read_stands_still(parts: Parts) -> None:
    """A read never lands, while all streams live: its request is served by another one."""
    world = pair(parts, Sizes(num_blocks=14))
    client = world.ask(Ask(LONG, 4))
    post_reads(world)
    stuck = set(world.flights)
    for _ in range(30):
        world.advance(1.0)
        deliver(world)
        for flight in set(world.flights) - stuck:
            while not flight.has_data:
                world.land(flight)
            world.end_read(flight)
        for worker in world.workers.values():
            world.step(worker)
    if not client.ended:
        raise Violation(f"{client.ask} waits for a read that stands still")
    settle(world)


def data_lands_after_its_read_stood_still(parts: Parts) -> None:
    """A read stands still for too long, others are served meanwhile; then the data lands."""
    world = pair(parts)
    gone = world.ask(Ask(LONG, 4))
    post_reads(world)
    decode = world.workers["decode"]
    world.advance(5.0)
    world.step(decode)
    world.leave(world.gateways[0], gone)
    world.ask(Ask((50, 51, 52), 4, alone=True))
    deliver(world, gateway_stream(world, "decode"))
    world.step(decode)
    world.step(decode)
    land_all(world)
    compute(world, decode)
    settle(world)


def submit_comes_after_its_stream(parts: Parts) -> None:
    """A stream breaks with a submit on it, which comes late on the next one, when decode has long given it up."""
    world = pair(parts)
    world.ask(Ask(LONG, 4))
    to_prefill = gateway_stream(world, "prefill")
    assert to_prefill.down
    world.break_stream(to_prefill, Break.CUT)
    world.notice_near(to_prefill)
    world.notice_far(to_prefill)
    deliver(world)
    world.advance(6.0)
    world.step(world.workers["prefill"])  # tells decode's early open that it is over
    deliver(world)
    settle(world)


def open_comes_after_a_reset(parts: Parts) -> None:
    """Prefill was told on an older stream that a handle is over; then decode opens it: it is told so at once."""
    world = pair(parts)
    client = world.ask(Ask(LONG, 4))
    to_prefill, to_decode, control = (
        gateway_stream(world, "prefill"),
        gateway_stream(world, "decode"),
        control_stream(world),
    )
    deliver(world, to_decode)
    world.leave(world.gateways[0], client)
    to_decode.down.clear()  # decode does not hear of it yet
    deliver(world, to_prefill)
    world.break_stream(to_prefill, Break.NEAR)
    world.notice_far(to_prefill)
    world.connect()
    deliver(world, gateway_stream(world, "prefill"))
    deliver(world, control)
    if opened := world.workers["decode"].core.open_ids:
        raise Violation(f"{opened} is over, and its consumer waits")
    settle(world)


def abort_comes_before_the_open(parts: Parts) -> None:
    """A client leaves when only prefill has heard of its request, and decode never does."""
    world = pair(parts)
    client = world.ask(Ask(LONG, 4))
    deliver(world, gateway_stream(world, "prefill"))
    compute(world, world.workers["prefill"])
    world.leave(world.gateways[0], client)
    world.break_stream(gateway_stream(world, "decode"), Break.CUT)
    settle(world)


def owner_of_pending_nodes_fails(parts: Parts) -> None:
    """A handoff fails while its blocks are being read; the next prompt with its prefix must not wait for it."""
    world = pair(parts)
    gone = world.ask(Ask(LONG, 4))
    post_reads(world)
    world.leave(world.gateways[0], gone)
    deliver(world)
    world.ask(Ask(LONG, 4, alone=True))
    settle(world)


def choices_share_a_block_that_a_lost_read_would_have_brought(parts: Parts) -> None:
    """Two choices fork while the last block of their prompt is read for another client, who leaves: both enter theirs.

    A trie with a cycle is walked for ever, so this world looks inside.
    """
    world = pair(parts, Sizes(num_blocks=14), looks_inside=True)
    decode = world.workers["decode"]
    world.ask(Ask(LONG[:7], 2, alone=True))
    deliver(world)
    compute(world, decode)
    gone = world.ask(Ask(LONG[:8], 6))
    post_reads(world)
    world.ask(Ask(LONG[:8], 6, alone=True, num_choices=2))
    deliver(world)
    world.step(decode)
    assert decode.core.engine.sequences.batch.num_free_slots == 1  # a read and two choices
    world.leave(world.gateways[0], gone)
    deliver(world)
    settle(world)


def local_prompts_fill_the_pool(parts: Parts) -> None:
    """Four prompts for the decode worker alone, of which the pool holds one at a time."""
    world = pair(parts, Sizes(num_blocks=7, max_num_seqs=4, chunk=8))
    for first in (100, 200, 300, 400):
        world.ask(Ask(tuple(range(first, first + 9)), 3, alone=True))
    settle(world, must_complete=True)


def a_group_of_ranks_decodes(parts: Parts) -> None:
    """A prompt is handed to a worker whose blocks are in the pools of two ranks, as the producer's are in one."""
    world = pair(parts, Sizes(of_ranks=WorkerRole.DECODE))
    world.ask(Ask(LONG, 4))
    settle(world, must_complete=True)
