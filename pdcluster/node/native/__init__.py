"""A node: its loop, prefill and decode sides, KV fetches, load reports."""
