"""Processes: children, supervision, ready lines, the cache of compiled kernels."""
