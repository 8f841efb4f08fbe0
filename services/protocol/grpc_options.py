"""gRPC channel arguments of every stream between Baton's processes.

Keepalive alone does not notice a stopped process; with the ping timeout set as well, it takes about four seconds. A
shorter timeout would mistake a busy machine for a stopped one.
"""


def host_port(host: str, port: int) -> str:
    """Returns an address as gRPC and people write it: IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_MAX_MESSAGE_BYTES = 64 << 20  # a snapshot of four million blocks

_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
)

_OUR_CHANNELS = (
    ("grpc.enable_http_proxy", 0),  # processes connect to addresses directly, whatever the environment says
    ("grpc.use_local_subchannel_pool", 1),  # a new channel makes a new connection, whatever happened to the last one
)

CLIENT_OPTIONS = (*_KEEPALIVE, *_OUR_CHANNELS)

# For bytes between two workers that watch each other on another stream. This stream does not look for stopped machines,
# since it might mistake a busy one for that, and reconnects at once after a broken connection.
BULK_CLIENT_OPTIONS = (
    *_OUR_CHANNELS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

SERVER_OPTIONS = (
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),  # permits the clients' pings above
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a port in use is an error; connections are not shared with another process
)
