"""Model files: download, inspection, text files, GGUF."""
