"""Scrapes and their samples."""

from __future__ import annotations

import contextlib
import socket
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def parsed(text):
    """{(name, labels as a sorted tuple of pairs): value}; as for Prometheus, a label with an empty value is none."""
    return {
        (sample.name, tuple(sorted(pair for pair in sample.labels.items() if pair[1]))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Samples(dict):
    def value(self, name, *, database="default", **labels):
        return self[f"mysqlqueue_{name}", tuple(sorted({"database": database, **labels}.items()))]


def free_ports(count):
    """The first of so many ports in a row that nobody uses."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for number in range(1, count):
                stack.enter_context(socket.create_server(("127.0.0.1", first + number)))
            return first


def read(port):
    """What a process serves at a port."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return response.read().decode()


def scrape(port):
    return Samples(parsed(read(port)))
