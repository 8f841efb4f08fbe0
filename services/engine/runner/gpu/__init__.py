"""A step on a GPU: `GpuRunner`, its device, and the memory of both."""
