"""`python -m loadtest.gpu`: another spelling of `python -m loadtest gpu`."""

import sys

from loadtest.gpu.command import main

if __name__ == "__main__":  # not in a process that a benchmark starts
    sys.exit(main(sys.argv[1:]))
