"""Runners: what executes a planned step. `TorchRunner` runs a model on the CPU, `GpuRunner` on a GPU, `SimulatedRunner`
a checkable stand-in.
"""
