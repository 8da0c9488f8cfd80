"""A serving engine of vLLM in processes of its own, and its connector."""
