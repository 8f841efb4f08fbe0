"""`python -m loadtest.micro`: another spelling of `python -m loadtest micro`."""

import sys

from loadtest.micro.command import main

if __name__ == "__main__":  # not in a process that a benchmark starts
    sys.exit(main(sys.argv[1:]))
