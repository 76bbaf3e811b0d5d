"""Data: the indexed token format, and the order in which samples are read, as arithmetic."""
