"""Checks and measurements of everything that runs on a CUDA GPU: `python -m loadtest gpu`."""
