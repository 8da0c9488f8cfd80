"""Implementations of what a forward pass needs, and the choice among them."""
