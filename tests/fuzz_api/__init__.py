"""Generated requests to a gateway's HTTP and gRPC: see `__main__.py`."""
