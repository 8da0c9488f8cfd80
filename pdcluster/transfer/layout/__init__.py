"""Which byte ranges carry which KV."""
