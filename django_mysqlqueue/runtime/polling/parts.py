"""The parts of the work for a group that its mode, planner, writer and hand-out have in common."""

from __future__ import annotations

from typing import NamedTuple

from django_mysqlqueue.runtime.polling.configured import Configuration
from django_mysqlqueue.runtime.polling.context import Context
from django_mysqlqueue.runtime.polling.health import Health
from django_mysqlqueue.runtime.polling.limited import Limited
from django_mysqlqueue.runtime.polling.memory import Memory


class Parts(NamedTuple):
    """What the work for a group knows, and remembers."""

    context: Context
    configuration: Configuration
    memory: Memory
    limited: Limited
    health: Health
