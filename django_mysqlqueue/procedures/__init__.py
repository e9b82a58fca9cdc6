"""Stored procedures with which clients in any language consume messages beside the subscribers in Python."""

CLIENT_PROCEDURES = ("queue_claim", "queue_ack", "queue_nack", "queue_reject", "queue_snooze", "queue_extend")
"""The procedures that clients call. Those whose names begin with ``queue__`` are for these alone."""
