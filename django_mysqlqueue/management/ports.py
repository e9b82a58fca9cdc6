"""``runsubscriber --metrics-port``: the ports on which processes serve their metrics."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.core.management.base import CommandError

from django_mysqlqueue.runtime.process.subscriber import Subscriber

HIGHEST = 65535


def port(text: str) -> int:
    """Parse a port number."""
    if not text.isdecimal() or not 1 <= int(text) <= HIGHEST:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer from 1 to {HIGHEST}")
    return int(text)


@dataclass(frozen=True, slots=True)
class MetricsPorts:
    """One port per process, consecutive. A replacement uses the port of the process that it replaces."""

    address: str
    first: int
    count: int

    @classmethod
    def of(cls, options: dict[str, Any]) -> MetricsPorts | None:
        """Return the ports that the command's options select, or None without ``--metrics-port``."""
        first = options["metrics_port"]
        if first is None:
            return None
        self = cls(options["metrics_address"], first, options["processes"] or 1)
        if self.first + self.count - 1 > HIGHEST:
            raise CommandError(f"--metrics-port {first} with --processes {self.count}: the highest port is {HIGHEST}.")
        if importlib.util.find_spec("prometheus_client") is None:
            raise CommandError("--metrics-port needs prometheus-client: run pip install 'django-mysqlqueue[metrics]'.")
        return self

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        last = self.first + self.count - 1
        return f"http://{host}:{self.first}/metrics{f' to port {last}' if self.count > 1 else ''}"

    def require(self) -> None:
        """Require that all ports are free and permitted."""
        from django_mysqlqueue.metrics.process import require_ports

        require_ports(self.address, range(self.first, self.first + self.count))

    def serve(self, subscriber: Subscriber, number: int) -> Callable[[], None]:
        """Serve the metrics of a process, and return a function that stops it."""
        from django_mysqlqueue.metrics.process import serve

        return serve(subscriber, self.address, self.first + number - 1)
