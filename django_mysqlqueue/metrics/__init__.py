"""Prometheus metrics: of the queue, from its tables, and of a subscriber's process (``process``).

Needs the extra ``metrics``. No metric has a label by key or message.
"""

from __future__ import annotations

from django_mysqlqueue.metrics.queue import QueueCollector
from django_mysqlqueue.metrics.views import view

__all__ = ["QueueCollector", "view"]
