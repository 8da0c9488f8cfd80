"""Logits to tokens: penalties, grammars, sampling."""
