"""Runners: what executes a planned step. `TorchRunner` runs a model, `SimulatedRunner` a checkable stand-in."""
