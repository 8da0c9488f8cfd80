"""vLLM as a node's engine. Nothing outside this package imports vllm."""
