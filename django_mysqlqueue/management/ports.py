"""``runsubscriber --metrics-port``: where its processes serve their metrics."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.core.management.base import CommandError

from django_mysqlqueue.runtime.process.subscriber import Subscriber

HIGHEST = 65535


def port(text: str) -> int:
    value = int(text)
    if not 1 <= value <= HIGHEST:
        raise ValueError(f"{value} is not from 1 to {HIGHEST}")
    return value


@dataclass(frozen=True, slots=True)
class MetricsPorts:
    """A port for each process, one after another: a process that is replaced hands its own on."""

    address: str
    first: int
    count: int

    @classmethod
    def of(cls, options: dict[str, Any]) -> MetricsPorts | None:
        """What the command's options say; None: no metrics.

        Raises:
            CommandError: there are not so many ports, or the extra is not installed.
        """
        first = options["metrics_port"]
        if first is None:
            return None
        self = cls(options["metrics_address"], first, options["processes"] or 1)
        if self.first + self.count - 1 > HIGHEST:
            raise CommandError(f"--metrics-port {first} with --processes {self.count}: ports end at {HIGHEST}.")
        if importlib.util.find_spec("prometheus_client") is None:
            raise CommandError("--metrics-port needs prometheus-client: pip install 'django-mysqlqueue[metrics]'.")
        return self

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        last = self.first + self.count - 1
        return f"http://{host}:{self.first}/metrics{f' and so on to port {last}' if self.count > 1 else ''}"

    def require(self) -> None:
        """Raises SubscriberError if one of the ports cannot be had."""
        from django_mysqlqueue.metrics.process import require_ports

        require_ports(self.address, range(self.first, self.first + self.count))

    def serve(self, subscriber: Subscriber, number: int) -> Callable[[], None]:
        """Serves the metrics of the process of that number (1 is the first); returns what ends it.

        Raises:
            SubscriberError: the port cannot be had.
        """
        from django_mysqlqueue.metrics.process import serve

        return serve(subscriber, self.address, self.first + number - 1)
