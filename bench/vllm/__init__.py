"""Clusters of nodes that run vLLM, measured in the environment of `scripts/vllm.sh`."""
