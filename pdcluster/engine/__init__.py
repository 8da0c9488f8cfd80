"""The engine: one model, one KV pool, one step at a time."""
