"""Django signals of the subscriber process."""

from __future__ import annotations

from django.dispatch import Signal

delivery_stale = Signal()
"""A buffered ack or nack came too late, when the delivery had been handed out again.

Arguments: ``group``, ``topic``, ``key`` (the partition), ``offset``, ``attempt``, ``outcome`` (``"ack"``, …).
"""
