"""Moving paged KV blocks between workers: layout, the handoff protocol, transports."""
