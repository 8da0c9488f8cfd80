"""Routing policies, and who asks them."""
