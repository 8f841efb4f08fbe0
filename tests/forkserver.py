"""Processes forked from one that has imported what they need, which takes longer than most tests."""

import multiprocessing

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["nixl", "services.prefill.main", "services.decode.main", "services.gateway.main"])
