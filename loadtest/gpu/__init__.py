"""Checks and measures everything that runs on a CUDA GPU: `python -m loadtest.gpu`."""
