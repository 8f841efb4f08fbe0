"""`baton doctor`: prints what the checks found; the exit code tells how bad it is."""

import sys

import typer

from services.cli.tls_checks import check_both_named
from services.config.option import Refusal
from services.doctor.config import DoctorConfig
from services.process.terminal import has_colours, width


def diagnose(config: DoctorConfig) -> int:
    """Prints the findings. Returns 0, or 2 where one is an error; with --strict 1 where one is a warning.

    Raises Refusal.
    """
    check_both_named(config.tls_cert, config.tls_key)
    if config.measure and not config.worker_addresses:
        raise Refusal("--measure is between --workers: name them")
    from services.doctor import doctor, report
    from services.doctor.finding import exit_code, worst

    examined = doctor.run(config)
    if config.as_json:
        typer.echo(report.as_json(examined))
    else:
        typer.echo(report.as_text(examined, width() if sys.stdout.isatty() else None), color=has_colours())
    return exit_code(worst(examined), strict=config.strict)
