"""Kernels as they run for real models, for `loadtest.gpu.compiled`."""
