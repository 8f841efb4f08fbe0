"""The parts of an API that HTTP and gRPC share: a request is checked, run and turned into text. Knows no worker."""
