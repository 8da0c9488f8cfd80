"""Ranks above 0 of a node: processes, channels, transfer endpoints."""
