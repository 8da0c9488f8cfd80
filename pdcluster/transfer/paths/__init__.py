"""Which backend carries a write."""
