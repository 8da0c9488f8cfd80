"""Copying and digesting, compiled."""
