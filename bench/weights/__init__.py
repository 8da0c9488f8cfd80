"""Weights of a cluster that serves."""
