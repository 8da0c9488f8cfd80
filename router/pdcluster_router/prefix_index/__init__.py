"""Which node has cached which blocks."""
