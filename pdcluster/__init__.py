"""LLM serving with prefill and decode on separate nodes."""
