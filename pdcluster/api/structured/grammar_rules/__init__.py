"""Rules of a grammar, and their EBNF."""
