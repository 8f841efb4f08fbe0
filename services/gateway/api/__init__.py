"""What every API of the gateway needs: requests checked, run and turned into text. Knows no HTTP, no gRPC, no worker."""
