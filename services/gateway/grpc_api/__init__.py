"""The public gRPC API: baton.v1.Inference."""
