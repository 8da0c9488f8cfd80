"""Tool calls and reasoning in the text of a model."""
