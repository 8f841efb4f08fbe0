"""The commands that change a running stack: restart and scale."""

from collections.abc import Mapping

from services.config import WorkerRole
from services.launcher.control import Arguments, CommandFailed, Tell
from services.launcher.members import Members

_MOST_DIGITS = 4  # of a number of workers


async def restart(members: Members, arguments: Arguments, tell: Tell) -> None:
    """Replaces one by one all children that have a successor. Raises CommandFailed where one does not start.

    Cancelled, it leaves the rest as it is; a successor that is not ready yet ends. A child that an earlier command told
    to end is waited for, and has no further successor.
    """
    if arguments:
        raise CommandFailed(f"restart takes no arguments, and has {', '.join(arguments)}")
    await members.until_ended(tell)
    for name in members.names():
        await members.replace(name, tell)


async def scale(members: Members, arguments: Arguments, tell: Tell) -> None:
    """Brings workers to the numbers that the arguments name by role, and says which there are. Raises CommandFailed.

    What is to be started is ready before anything is told to end. Of a role, those end first that do not serve now,
    then those with the highest numbers. Without arguments it changes nothing.
    """
    wanted = _numbers(arguments)
    if wanted:
        await members.until_ended(tell)
    here = {role: members.of_role(role) for role in wanted}
    await members.start([role for role, number in wanted.items() for _ in range(number - len(here[role]))], tell)
    await members.retire([name for role, number in wanted.items() for name in here[role][number:]], tell)
    tell("; ".join(_described(members, role) for role in WorkerRole))


def _numbers(arguments: Arguments) -> Mapping[WorkerRole, int]:
    """The numbers of workers, by role. Raises CommandFailed."""
    roles = {role.value: role for role in WorkerRole}
    found: dict[WorkerRole, int] = {}
    for name, text in arguments.items():
        if name not in roles:
            raise CommandFailed(f"scale knows no {name!r}; it knows {' and '.join(roles)}")
        if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
            raise CommandFailed(f"{name}={text} is no number of workers")
        found[roles[name]] = int(text)
    if found.get(WorkerRole.DECODE) == 0:
        raise CommandFailed("decode=0: every request ends at a decode worker, so that there is at least one")
    return found


def _described(members: Members, role: WorkerRole) -> str:
    names = sorted(members.of_role(role), key=members.names().index)
    return f"{len(names)} {role.value}" + (f" ({', '.join(names)})" if names else "")
