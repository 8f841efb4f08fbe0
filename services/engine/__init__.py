"""The engine: model, paged KV, prefix cache, step loop. Knows no gRPC and no Redis."""
