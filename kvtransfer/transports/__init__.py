"""Transports, which move the bytes of blocks: `memory` inside one process (tests), `nixl` and `grpc` between hosts."""
