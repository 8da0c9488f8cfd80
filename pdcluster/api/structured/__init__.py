"""Structured output: what a request wants, as a grammar."""
