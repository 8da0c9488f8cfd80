"""KV pages: layout, prefix hashes, ownership, memory."""
