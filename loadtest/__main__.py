"""`python -m loadtest NAME`: runs one of the benchmarks.

    python -m loadtest client --workload decode     how fast a server on this machine answers
    python -m loadtest agreement --requests 64      one run's figures by client, gateway and console, side by side
    python -m loadtest compare --help               Baton and its peers in turn, as ratios
    python -m loadtest micro --help                 the cost of one part of Baton
    python -m loadtest overload --slo 2             what a server does with more requests than it can answer in time
    python -m loadtest gpu --out RESULTS            checks and measures the GPU path, on a machine that has a card
    python -m loadtest quality --help               one model's answers beside another's, or its own in fewer bits
    python -m loadtest smollm2 DIR                  writes the demo model as a checkpoint that every server reads

Options without a name are those of `client`. A benchmark's module is imported when its name is given: each needs other
packages.
"""

import sys
from importlib import import_module

_COMMANDS = {
    "agreement": "loadtest.agreement",
    "client": "loadtest.bench.client",
    "compare": "loadtest.compare.command",
    "gpu": "loadtest.gpu.command",
    "micro": "loadtest.micro.command",
    "overload": "loadtest.overload.command",
    "quality": "loadtest.quality.command",
    "soak": "loadtest.soak.command",
    "smollm2": "loadtest.compare.smollm2",
}


def main(arguments: list[str]) -> int:
    """Runs the named benchmark with the other arguments, and returns its exit code; 2 for a name that there is not."""
    if arguments in (["-h"], ["--help"]):
        sys.stdout.write(f"{__doc__}\n`python -m loadtest NAME --help` lists the options of one.\n")
        return 0
    name, options = ("client", arguments) if _has_no_name(arguments) else (arguments[0], arguments[1:])
    if name not in _COMMANDS:
        sys.stderr.write(f"loadtest: no benchmark is called {name}; there are {', '.join(_COMMANDS)}\n")
        return 2
    code: int = import_module(_COMMANDS[name]).main(options)
    return code


def _has_no_name(arguments: list[str]) -> bool:
    return not arguments or arguments[0].startswith("-")


if __name__ == "__main__":  # not in a process that a benchmark starts
    sys.exit(main(sys.argv[1:]))
