"""Prometheus metrics of the queue, read from its tables, and of a subscriber process (``process``).

They require the extra ``metrics``. No metric has a label for keys or messages.
"""

from __future__ import annotations

from django_mysqlqueue.metrics.queue import QueueCollector
from django_mysqlqueue.metrics.views import view

__all__ = ["QueueCollector", "view"]
