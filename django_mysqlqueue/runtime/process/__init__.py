"""A subscriber process, and its supervisor."""
