"""Transports move block bytes. `memory` stays in one process (tests); `nixl` crosses processes and hosts."""
