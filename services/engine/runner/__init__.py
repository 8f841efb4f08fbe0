"""Runners execute planned steps: `TorchRunner` runs a model on the CPU, `GpuRunner` on a GPU, and `SimulatedRunner` a
checkable stand-in for a model.
"""
