"""Links between processes: frames, leases, reconnection, encryption."""
