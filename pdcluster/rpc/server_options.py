"""What every gRPC server of ours is set up with."""

from __future__ import annotations

from typing import Final

HANDSHAKE_S: Final = 10.0
# A connection without calls ends after it, and clients make another: else idle strangers would keep others out.
IDLE_S: Final = 60.0
MOST_CONNECTIONS: Final = 4096

Options = tuple[tuple[str, int], ...]


def server_options(*, is_port_shared: bool = False, num_connections: int = MOST_CONNECTIONS) -> Options:
    """is_port_shared: a second process may listen on the port; else it must fail, not take half of the calls.

    num_connections: at a time, such that do not begin included.
    """
    return (
        ("grpc.so_reuseport", int(is_port_shared)),
        # A packed message of 8 MiB may unpack to 8 GiB, and gRPC looks at the packed size only.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1e3)),
        ("grpc.max_connection_idle_ms", round(IDLE_S * 1e3)),
        ("grpc.max_allowed_incoming_connections", num_connections),
    )
