"""Benchmarks of Baton and its peers: `python -m loadtest NAME`.

`bench` (which is `baton bench` too) and `compare` know Baton only from outside, by its command, its URL and its
metrics; `micro` and `gpu` measure parts of it."""

import os

# As in services/__init__.py, and for processes that import gRPC before it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
