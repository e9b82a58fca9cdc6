"""Stored procedures with which clients in any language consume messages beside the subscribers in Python."""
