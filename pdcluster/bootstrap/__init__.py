"""Who is alive: registration of nodes, leases, snapshots."""
