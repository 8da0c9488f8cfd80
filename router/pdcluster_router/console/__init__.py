"""A page for operators: what pdctl does, in a browser."""
