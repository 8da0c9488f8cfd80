"""Clusters on one machine: up, demo, warming of compiled code."""
