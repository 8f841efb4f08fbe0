"""`baton restart`: has a running `baton up` replace its workers and its gateway, one by one."""

import typer

from services.config.option import Refusal
from services.launcher import control


def restart(port: int) -> int:
    """Restarts the `baton up` whose gateway has this port for HTTP; prints a line for each process. Returns 0.

    Raises Refusal.
    """
    try:
        for line in control.ask(control.socket_path(port), "restart"):
            typer.echo(line)
    except OSError as error:
        raise Refusal(f"no `baton up` of this user serves at port {port}; name its port with --port") from error
    except control.CommandFailed as failure:
        raise Refusal(f"the restart went no further: {failure}") from failure
    return 0
