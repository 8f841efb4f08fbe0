"""Findings by their names, for tests."""

from collections.abc import Sequence

from services.doctor.finding import Finding, Level


def levels(findings: Sequence[Finding]) -> dict[str, Level]:
    """The level of each finding; names are unique."""
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding.level for finding in findings}


def named(findings: Sequence[Finding], name: str) -> Finding:
    """The one finding of this name."""
    (found,) = [finding for finding in findings if finding.name == name]
    return found
