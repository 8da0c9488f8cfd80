"""Programs that use a cluster, small enough to read whole."""
