"""vLLM as a node's engine. The only package that imports vllm, and never before an engine starts."""
