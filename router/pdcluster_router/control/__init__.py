"""HTTP calls of trainers, under the names of vLLM and SGLang."""
