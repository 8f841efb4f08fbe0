"""A step on a GPU: `GpuRunner`, what it asks of a device, and how it comes to its memory."""
