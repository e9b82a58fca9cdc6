"""Metrics of real subscriber processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys

import pytest
from django.core.management import CommandError, call_command
from prometheus_client import CollectorRegistry

from django_mysqlqueue.inspection.bounds import SCRAPES
from django_mysqlqueue.metrics.process import ProcessMetrics, Source
from django_mysqlqueue.metrics.queue import QueueCollector
from tests.support.internals import Inbox
from tests.support.metrics import free_ports, scrape
from tests.support.paths import ROOT
from tests.support.processes import Worker, publish_numbers, wait_for


def up(port):
    try:
        return scrape(port)
    except OSError:
        return None


def acked(found, group="plain"):
    return found.value("deliveries_total", topic="p.plain", group=group, outcome="acked")


@pytest.fixture
def worker(db, tmp_path):
    workers = []

    def start(*arguments):
        workers.append(Worker(tmp_path, *arguments))
        return workers[-1]

    yield start
    for one in workers:
        one.end()


@pytest.mark.any_engine
@pytest.mark.processes
def test_a_process_serves_its_metrics(worker):
    port = free_ports(1)
    one = worker("--metrics-port", str(port), "--group", "plain")
    wait_for(lambda: f"metrics   http://127.0.0.1:{port}/metrics\n" in one.output, one)
    wait_for(lambda: up(port), one)
    assert acked(scrape(port)) == 0
    publish_numbers("p.plain", 20)
    wait_for(lambda: acked(scrape(port)) == 20, one)
    found = scrape(port)
    assert found.value("end_to_end_seconds_count", topic="p.plain", group="plain") == 20
    assert found.value("process_running", topic="p.plain", group="plain") == 0
    assert found["process_open_fds", ()] > 0
    one.send(signal.SIGTERM)
    assert one.wait() == 0
    assert up(port) is None


@pytest.mark.any_engine
@pytest.mark.processes
def test_each_process_has_a_port_of_its_own_for_good(worker):
    """One that is replaced hands its port on."""
    port = free_ports(2)
    one = worker("--processes", "2", "--metrics-port", str(port), "--group", "plain")
    wait_for(lambda: f"metrics   http://127.0.0.1:{port}/metrics to port {port + 1}\n" in one.output, one)
    wait_for(lambda: up(port) and up(port + 1), one)
    publish_numbers("p.plain", 40)
    wait_for(lambda: acked(scrape(port)) + acked(scrape(port + 1)) == 40, one)
    (first,) = [line for line in one.output.splitlines() if "child.started number=1 " in line]
    os.kill(int(first.rpartition("pid=")[2]), signal.SIGKILL)
    wait_for(lambda: one.output.count("child.started number=1 ") == 2, one)
    wait_for(lambda: up(port), one)
    assert acked(scrape(port)) == 0, "it counts from its own start, as Prometheus expects"
    one.send(signal.SIGTERM)
    assert one.wait() == 0


@pytest.mark.any_engine
@pytest.mark.processes
@pytest.mark.parametrize("options", [[], ["--processes", "2"]])
def test_a_port_that_is_taken(worker, options):
    port = free_ports(2)
    with socket.create_server(("127.0.0.1", port + (1 if options else 0))):
        one = worker("--metrics-port", str(port), *options)
        assert one.wait() == 1
    assert "The metrics cannot be served at 127.0.0.1 port" in one.output
    assert "Traceback" not in one.output
    assert "child.started" not in one.output, "said once, and not by each process"


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1"])
def test_what_is_no_port(db, port):
    with pytest.raises(CommandError, match=r"--metrics-port: .*: must be an integer from 1 to 65535"):
        call_command("runsubscriber", "--metrics-port", port)


def test_ports_end(db):
    with pytest.raises(CommandError, match="--metrics-port 65535 with --processes 2: the highest port is 65535"):
        call_command("runsubscriber", "--metrics-port", "65535", "--processes", "2")


def test_without_the_extra(db, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(CommandError, match=r"pip install 'django-mysqlqueue\[metrics\]'"):
        call_command("runsubscriber", "--metrics-port", "9100")


def test_the_reference_lists_every_metric(db):
    page = (ROOT / "docs/reference/monitoring.md").read_text()
    registry = CollectorRegistry()
    registry.register(QueueCollector())
    ProcessMetrics([Source("default", {}, Inbox([], leases_good=lambda: True))], registry)
    named = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}
    assert set(re.findall(r"^\| `(mysqlqueue_\w+)` \|", page, re.MULTILINE)) == named
    guide = (ROOT / "docs/howto/observe.md").read_text()
    for name in re.findall(r"mysqlqueue_\w+", guide.split("## Prometheus")[1].split("## Signals")[0]):
        assert re.sub(r"_(sum|bucket|count)$", "", name) in named or name in named, name


def test_counts_in_the_text_are_true():
    page = (ROOT / "docs/reference/monitoring.md").read_text()
    assert f"counts stop at {SCRAPES.count:,}" in page
    assert f"the {SCRAPES.groups:,} groups that are shown" in page
