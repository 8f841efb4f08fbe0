"""Submits and aborts, alone and several in one message."""

from kvtransfer.ids import WorkerId
from protos import worker_pb2
from services.protocol.messages import Abort, Command, Commands, HandTo, Submit, TakeFrom
from services.protocol.wire.capsule import pack_capsule, parse_capsule
from services.protocol.wire.errors import WireError


def pack_commands(commands: Commands) -> worker_pb2.Commands:
    """Packs several commands."""
    return worker_pb2.Commands(commands=map(_pack_command, commands.commands))


def parse_commands(packed: worker_pb2.Commands) -> Commands:
    """Parses several commands. Raises WireError."""
    return Commands(tuple(map(parse_command, packed.commands)))


def parse_command(packed: worker_pb2.Command | worker_pb2.GatewayMessage) -> Command:
    """Parses one command, in a message of its own or among others. Raises WireError."""
    if packed.HasField("abort"):
        return Abort(packed.abort.handle)
    if packed.HasField("submit"):
        return _parse_submit(packed.submit)
    raise WireError("a command without content")


def pack_abort(abort: Abort) -> worker_pb2.Abort:
    """Packs an abort."""
    return worker_pb2.Abort(handle=abort.handle)


def pack_submit(submit: Submit) -> worker_pb2.Submit:
    """Packs a submit with its capsule."""
    packed = worker_pb2.Submit(
        handle=submit.handle,
        capsule=pack_capsule(submit.capsule),
        timeout_s=submit.timeout_s,
        request_id=submit.request_id,
        seeds=submit.seeds,
    )
    match submit.handoff:
        case HandTo(worker):
            packed.hand_to.incarnation = worker
        case TakeFrom(address, worker):
            packed.take_from.address = address
            packed.take_from.incarnation = worker
        case None:
            pass
    return packed


def _pack_command(command: Command) -> worker_pb2.Command:
    if isinstance(command, Abort):
        return worker_pb2.Command(abort=pack_abort(command))
    return worker_pb2.Command(submit=pack_submit(command))


def _parse_submit(packed: worker_pb2.Submit) -> Submit:
    handoff: HandTo | TakeFrom | None = None
    match packed.WhichOneof("handoff"):
        case "hand_to":
            handoff = HandTo(WorkerId(packed.hand_to.incarnation))
        case "take_from":
            handoff = TakeFrom(packed.take_from.address, WorkerId(packed.take_from.incarnation))
    if not packed.handle:
        raise WireError("a submit without a handle")
    return Submit(
        handle=packed.handle,
        capsule=parse_capsule(packed.capsule),
        timeout_s=packed.timeout_s,
        request_id=packed.request_id,
        handoff=handoff,
        seeds=tuple(packed.seeds),
    )
