"""KV from node to node."""
