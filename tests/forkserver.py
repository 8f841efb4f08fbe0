"""Processes forked from one that has imported what they need: torch and NIXL outlast most tests."""

import multiprocessing

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["nixl", "services.prefill.main", "services.decode.main"])
