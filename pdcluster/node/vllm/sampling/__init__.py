"""Our sampling inside vLLM: parameters, grammars, penalties."""
