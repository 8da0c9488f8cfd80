"""Weights that are pushed to nodes and passed on between them."""
