"""Baton's processes, and what they are made of."""

import os

# gRPC reads this when it is imported. No process goes on with gRPC in a fork; where one starts another program, gRPC's
# handlers of forks write to stderr, and wait for ever where nobody reads that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
