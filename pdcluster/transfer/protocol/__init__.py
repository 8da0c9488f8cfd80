"""The protocol of a ticket: the writer and the reader. Pure."""
