"""Prometheus metrics: the queue's from its tables, a process's own, and who may see them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
import urllib.request

import pytest
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import path
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from django_mysqlqueue import Message, conf, metrics, publish, publish_many
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.inspection.bounds import SCRAPES, Bounds
from django_mysqlqueue.management.commands.queuestatus import read_status
from django_mysqlqueue.metrics.process import OUTCOMES, ProcessMetrics, serve
from django_mysqlqueue.metrics.queue import QueueCollector
from django_mysqlqueue.models import ConsumerGroup, DeliveryState, OutboxMessage
from django_mysqlqueue.operations import pausing
from django_mysqlqueue.runtime.handling.inbox import Inbox
from django_mysqlqueue.runtime.process.subscriber import Subscriber
from django_mysqlqueue.service import groups
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.signals import delivery_settled
from django_mysqlqueue.sql.session import Session
from tests.support import oracle
from tests.support.harness import USING, Sub, handler, sequence
from tests.test_processes import ROOT, Worker, publish_numbers, wait_for

TOKEN = "0123456789abcdefghij"  # noqa: S105
REF = GroupRef("g", "t")
urlpatterns = [
    path("metrics/", metrics.view),
    path("elsewhere/", metrics.view, {"using": "queue"}),
]


def parsed(text):
    """{(name, labels as a sorted tuple of pairs): value}"""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def collected(collector=None):
    registry = CollectorRegistry()
    registry.register(collector or QueueCollector())
    return Samples(parsed(generate_latest(registry).decode()))


class Samples(dict):
    def value(self, name, **labels):
        return self[f"mysqlqueue_{name}", tuple(sorted(labels.items()))]


# -- the queue ------------------------------------------------------------------


def test_an_empty_queue(db):
    found = collected()
    assert found == {
        ("mysqlqueue_outbox_waiting", ()): 0,
        ("mysqlqueue_outbox_oldest_age_seconds", ()): 0,
        ("mysqlqueue_outbox_scheduled", ()): 0,
        ("mysqlqueue_last_offset", ()): found.value("last_offset"),
        ("mysqlqueue_more_groups", ()): 0,
    }


def busy():
    """Acked, failed, in hand, dead, new, due and scheduled messages of two groups."""

    def work(delivery):
        if delivery.payload % 10 == 3:
            delivery.nack(delay=3600)
        elif delivery.payload % 10 == 4:
            delivery.reject("never")

    publish_many("t", [Message(n, key=f"key-{n % 7}") for n in range(50)])
    sub = Sub(handler(function=work), handler(group="idle"), batch_size=200)
    sub.step()
    for _ in range(20):
        held = sub.take()
        if held is not None and held.claimed.ref == REF:
            sub.run(held)
    sub.flush()
    publish_many("t", range(30))
    sequence()
    publish_many("t", range(4))
    publish("t", 1, delay=3600)
    pausing.pause(USING, GroupRef("idle", "t"), actor="tests")
    return sub


def test_beside_exact_counts(db, clock):
    sub = busy()
    clock.advance(100)
    sub.heart.beat()  # of a group without subscribers no lag is exact
    found = collected()
    exact = read_status(USING)
    assert len(exact.queue.groups) == 2
    for group in exact.queue.groups:
        labels = {"topic": group.ref.topic, "group": group.ref.group}
        assert found.value("lag", **labels) == group.lag.value == oracle.unsettled(Session(USING), group.ref)[0] > 0
        assert found.value("in_flight", **labels) == group.in_flight.value
        assert found.value("retrying", **labels) == group.retrying.value
        assert found.value("dead_letters", **labels) == group.dead_letters.value
        assert found.value("subscribers", **labels) == len(group.live) == 1
        assert found.value("paused", **labels) == (group.ref.group == "idle")
        age = (exact.queue.now - group.oldest_at) / 1000
        assert found.value("oldest_unacked_age_seconds", **labels) == pytest.approx(age, abs=20)
        assert age >= 100
        for count in ("lag", "in_flight", "retrying", "dead_letters"):
            assert found.value("count_exact", count=count, **labels) == 1
    working = next(group for group in exact.queue.groups if group.ref.group == "g")
    assert working.in_flight
    assert working.retrying
    (topic,) = (topic for topic in exact.topics if topic.topic == "t")
    # Dead letters on their way are in the outbox too.
    assert found.value("outbox_waiting") == sum(topic.waiting for topic in exact.topics) >= topic.waiting == 4
    assert found.value("outbox_scheduled") == topic.scheduled == 1
    assert found.value("outbox_oldest_age_seconds") >= 100
    assert found.value("last_offset") == exact.queue.last_offset


def test_live_subscribers(db):
    Sub(handler())
    Sub(handler(), handler(group="other"))
    found = collected()
    assert found.value("subscribers", topic="t", group="g") == 2
    assert found.value("subscribers", topic="t", group="other") == 1


def test_a_count_that_stops_says_so(db, monkeypatch):
    monkeypatch.setattr(QueueCollector, "bounds", Bounds(count=5))
    publish_many("t", [Message(n, key="k") for n in range(8)])
    sequence()
    groups.register(USING, REF, mode="ordered", start="earliest")
    Sub(handler()).step()
    found = collected()
    assert found.value("lag", topic="t", group="g") == 5
    assert found.value("count_exact", topic="t", group="g", count="lag") == 0
    assert found.value("count_exact", topic="t", group="g", count="dead_letters") == 1


def test_no_label_names_a_key_or_a_message(db):
    """Nor does any value of a label: one series for each key would fill the memory of Prometheus."""
    busy()
    found = collected()
    assert {name for _, labels in found for name, _ in labels} == {"topic", "group", "count"}
    values = {value for _, labels in found for _, value in labels}
    assert values == {"t", "g", "idle", "lag", "in_flight", "retrying", "dead_letters"}


def test_names_of_plain_sql_are_escaped(db):
    topic = 'a"b\\c\nd{}'
    ConsumerGroup.objects.create(consumer_group='g"\n', topic=topic, mode="ordered")
    assert collected().value("lag", topic=topic, group='g"\n') == 0


def test_more_groups_than_are_shown(db, monkeypatch):
    monkeypatch.setattr(QueueCollector, "bounds", Bounds(groups=2))
    for number in range(3):
        groups.register(USING, GroupRef(f"g{number}", "t"), mode="ordered", start="earliest")
    found = collected()
    assert found.value("more_groups") == 1
    assert len([name for name, _ in found if name == "mysqlqueue_lag"]) == 2


def test_registering_asks_no_database(db):
    with CaptureQueriesContext(connection) as captured:
        registry = CollectorRegistry(auto_describe=True)
        registry.register(QueueCollector())
    assert not captured.captured_queries
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(QueueCollector())
    described = {family.name for family in QueueCollector().describe()}
    assert described == {family.name for family in QueueCollector().collect()}


def test_a_scrape_changes_nothing(db):
    busy()
    with CaptureQueriesContext(connection) as captured:
        collected()
    assert all(query["sql"].startswith("SELECT") for query in captured), captured.captured_queries


# -- who may see it ---------------------------------------------------------------


@pytest.fixture
def site(db, settings):
    settings.ROOT_URLCONF = __name__
    settings.MYSQLQUEUE = {"METRICS_TOKEN": TOKEN}
    User.objects.all().delete()
    yield Client(raise_request_exception=True)
    User.objects.all().delete()


def get(client, authorization=None, where="/metrics/", **headers):
    if authorization is not None:
        headers["Authorization"] = authorization
    return client.get(where, headers=headers)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_token(site, scheme):
    publish("t", 1)
    response = get(site, f"{scheme} {TOKEN}")
    assert response.status_code == 200
    assert parsed(response.content.decode())["mysqlqueue_outbox_waiting", ()] == 1
    assert response["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "no-store" in response["Cache-Control"]


@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN.upper()}",
        "Bearer é",
        "Bearer None",
        f"Basic {TOKEN}",
        f"Token {TOKEN}",
        TOKEN,
        "",
        None,
    ],
)
def test_no_token(site, authorization):
    with CaptureQueriesContext(connection) as captured:
        response = get(site, authorization)
    assert response.status_code == 401
    assert response["WWW-Authenticate"].startswith("Bearer")
    assert b"mysqlqueue_" not in response.content
    assert not captured.captured_queries, "strangers cost the queue nothing"


@pytest.mark.parametrize("token", [{}, {"METRICS_TOKEN": None}, {"METRICS_TOKEN": ""}])
@pytest.mark.parametrize("authorization", ["Bearer", "Bearer ", "Bearer None", f"Bearer {TOKEN}", None])
def test_without_the_setting_no_token_is_right(site, settings, token, authorization):
    settings.MYSQLQUEUE = token
    response = get(site, authorization)
    assert response.status_code == 401
    assert "No METRICS_TOKEN is configured" in response.content.decode()
    settings.MYSQLQUEUE = {"METRICS_TOKEN": TOKEN}
    assert "No METRICS_TOKEN" not in get(site, "Bearer x").content.decode()


@pytest.mark.parametrize("authorization", ["Bearer", "Bearer short-secret", f"Bearer {TOKEN}", None])
def test_a_bad_token_in_the_settings_opens_no_door(site, settings, authorization):
    settings.MYSQLQUEUE = {"METRICS_TOKEN": "short-secret"}
    response = get(site, authorization)
    assert response.status_code == 500
    assert "MYSQLQUEUE['METRICS_TOKEN'] = … must be at least 20" in response.content.decode()
    assert "short-secret" not in response.content.decode()
    site.force_login(User.objects.create_superuser("ada"))
    assert get(site).status_code == 200, "a login needs no token"


@pytest.mark.parametrize(
    ("options", "permitted", "status"),
    [
        ({"is_staff": True}, True, 200),
        ({"is_staff": True, "is_superuser": True}, False, 200),
        ({"is_staff": True}, False, 403),
        ({"is_staff": False}, True, 403),
        ({"is_staff": False, "is_superuser": True}, False, 403),
    ],
)
def test_users(site, options, permitted, status):
    user = User.objects.create_user("somebody", **options)
    if permitted:
        user.user_permissions.add(Permission.objects.get(codename="view_dashboard"))
    site.force_login(user)
    assert get(site).status_code == status
    assert get(site, "Bearer wrong").status_code == 401, "who shows a token is judged by it"
    user.is_active = False
    user.save()
    assert get(site).status_code == 401


def test_without_the_middleware_for_users(db, settings):
    settings.MYSQLQUEUE = {"METRICS_TOKEN": TOKEN}
    factory = RequestFactory()
    assert metrics.view(factory.get("/")).status_code == 401
    assert metrics.view(factory.get("/", headers={"Authorization": f"Bearer {TOKEN}"})).status_code == 200
    request = factory.get("/")
    request.user = AnonymousUser()
    assert metrics.view(request).status_code == 401


def test_where_all_views_want_a_login(site, settings):
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.contrib.auth.middleware.LoginRequiredMiddleware"]
    assert get(site, f"Bearer {TOKEN}").status_code == 200
    assert get(site).status_code == 401, "no redirect to a page for people"


def test_it_is_only_read(site):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert site.post("/metrics/", headers=headers).status_code == 405
    head = site.head("/metrics/", headers=headers)
    assert (head.status_code, head.content) == (200, b"")


def test_open_metrics(site):
    response = get(site, f"Bearer {TOKEN}", accept="application/openmetrics-text; version=1.0.0,text/plain;q=0.5")
    assert response["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert response.content.endswith(b"# EOF\n")


def test_a_queue_on_another_alias(site, queue_db):
    OutboxMessage.objects.using("queue").create(topic="t", payload=b"1")
    found = parsed(get(site, f"Bearer {TOKEN}", "/elsewhere/").content.decode())
    assert found["mysqlqueue_outbox_waiting", ()] == 1
    assert parsed(get(site, f"Bearer {TOKEN}").content.decode())["mysqlqueue_outbox_waiting", ()] == 0


def test_the_token_is_not_shown(settings):
    settings.MYSQLQUEUE = {"METRICS_TOKEN": TOKEN}
    assert not conf.problems()
    assert get_settings().metrics_token == TOKEN
    assert TOKEN not in repr(get_settings())


# -- a process --------------------------------------------------------------------


class Process:
    """A subscriber by hand, with metrics in a registry of their own."""

    def __init__(self, *handlers, **options):
        self.sub = Sub(*handlers, **options)
        self.registry = CollectorRegistry()
        self.metrics = ProcessMetrics(self.sub.handlers, self.sub.inbox, self.registry)
        self.sub.inbox.watch.listeners.append(self.metrics.settled)

    def samples(self):
        return Samples(parsed(generate_latest(self.registry).decode()))


def test_deliveries_by_outcome(db):
    assert not delivery_settled.receivers

    def work(delivery):
        match delivery.payload:
            case "nack" if delivery.attempt == 1:
                delivery.nack(0)
            case "reject":
                delivery.reject("never")
            case "snooze":
                delivery.snooze(3600)
            case "raise":
                raise ValueError("broken")

    process = Process(handler(function=work, max_attempts=2))
    found = process.samples()
    for outcome in OUTCOMES:
        assert found.value("deliveries_total", topic="t", group="g", outcome=outcome) == 0, "there from the start"
    publish_many("t", ["ack", "ack", "nack", "reject", "snooze", "raise"])
    process.sub.settle()
    publish("t", "lost")
    process.sub.step()
    held = process.sub.take()
    DeliveryState.objects.filter(message_offset=held.claimed.offset).update(delivery_token=12345)
    process.sub.run(held)
    process.sub.flush()
    found = process.samples()
    assert {
        outcome: found.value("deliveries_total", topic="t", group="g", outcome=outcome) for outcome in OUTCOMES
    } == {
        "acked": 3,
        "failed": 2,
        "snoozed": 1,
        "dead_lettered": 2,
        "released": 0,
        "lost": 1,
    }
    assert found.value("processing_seconds_count", topic="t", group="g") == 9
    assert found.value("end_to_end_seconds_count", topic="t", group="g") == 3
    assert {name for _, labels in found for name, _ in labels} == {"topic", "group", "outcome", "le"}


def test_a_message_that_is_dead_lettered_without_a_call_has_no_processing_time(db):
    publish("t", "deadly")
    process = Process(handler(max_attempts=1, mode="shared"))
    process.sub.step()
    assert process.sub.take() is not None
    # Its subscriber was lost in its only attempt.
    DeliveryState.objects.update(delivered_by="lost", retry_count=1, invisible_until=0)
    process = Process(handler(max_attempts=1, mode="shared"), name="next")
    process.sub.step()
    found = process.samples()
    assert found.value("deliveries_total", topic="t", group="g", outcome="dead_lettered") == 1
    assert found.value("processing_seconds_count", topic="t", group="g") == 0


def test_latency_is_from_the_place_in_the_log_to_the_ack(db, clock):
    process = Process(handler(function=lambda delivery: time.sleep(0.02)))
    publish("t", 1)
    sequence()
    clock.advance(100)
    process.sub.settle()
    found = process.samples()
    labels = {"topic": "t", "group": "g"}
    assert 100 <= found.value("end_to_end_seconds_sum", **labels) < 120
    assert found.value("end_to_end_seconds_bucket", le="60.0", **labels) == 0
    assert found.value("end_to_end_seconds_bucket", le="600.0", **labels) == 1
    assert 0.02 <= found.value("processing_seconds_sum", **labels) < 5


def test_the_call_of_a_batch_is_shared_out(db):
    process = Process(handler(function=lambda deliveries: time.sleep(0.2), batch=True, batch_size=100))
    publish_many("t", [Message(n, key="k") for n in range(100)])
    process.sub.settle()
    found = process.samples()
    assert found.value("processing_seconds_count", topic="t", group="g") == 100
    assert 0.2 <= found.value("processing_seconds_sum", topic="t", group="g") < 2


def test_what_runs_and_what_waits(db):
    process = Process(handler(), handler(group="other"))
    publish_many("t", [Message(n, key="k") for n in range(5)])
    process.sub.step()
    process.sub.take()
    found = process.samples()
    counts = sorted(
        (found.value("process_running", topic="t", group=group), found.value("process_waiting", topic="t", group=group))
        for group in ("g", "other")
    )
    assert counts == [(0, 5), (1, 4)]


def test_counting_costs_no_statement(db):
    def cost(make):
        publish_many("t", [Message(n, key="k") for n in range(20)])
        made = make(handler())
        sub = made.sub if isinstance(made, Process) else made
        with CaptureQueriesContext(connection) as captured:
            sub.step()
            sub.work()
            sub.flush()
        sub.leave()
        return len(captured)

    cost(Sub)
    assert cost(Process) == cost(Sub)


@pytest.mark.any_engine
def test_serving(db):
    subscriber = Subscriber(USING, {REF: handler()}, get_settings())
    port = free_ports(1)
    stop = serve(subscriber, "127.0.0.1", port)
    try:
        assert scrape(port).value("process_running", topic="t", group="g") == 0
        assert ("process_cpu_seconds_total", ()) in scrape(port), "with all else in the registry"
        before = generate_latest(REGISTRY)
        with pytest.raises(SubscriberError, match=f"127.0.0.1 port {port}: .*in use"):
            serve(Subscriber(USING, {REF: handler()}, get_settings()), "127.0.0.1", port, CollectorRegistry())
        assert b"mysqlqueue_deliveries" in before
    finally:
        stop()
    assert b"mysqlqueue_" not in generate_latest(REGISTRY)
    assert not subscriber.inbox.watch.is_wanted()
    with pytest.raises(OSError, match="refused"):
        scrape(port)
    serve(subscriber, "127.0.0.1", port)()  # and again


# -- runsubscriber ----------------------------------------------------------------


def free_ports(count):
    """The first of so many ports in a row that nobody uses."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for number in range(1, count):
                stack.enter_context(socket.create_server(("127.0.0.1", first + number)))
            return first


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return Samples(parsed(response.read().decode()))


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
    wait_for(lambda: f"metrics   http://127.0.0.1:{port}/metrics and so on to port {port + 1}\n" in one.output, one)
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
    with pytest.raises(CommandError, match="--metrics-port"):
        call_command("runsubscriber", "--metrics-port", port)


def test_ports_end(db):
    with pytest.raises(CommandError, match="--metrics-port 65535 with --processes 2: ports end at 65535"):
        call_command("runsubscriber", "--metrics-port", "65535", "--processes", "2")


def test_without_the_extra(db, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(CommandError, match=r"pip install 'django-mysqlqueue\[metrics\]'"):
        call_command("runsubscriber", "--metrics-port", "9100")


def test_the_reference_lists_every_metric(db):
    page = (ROOT / "docs/reference/monitoring.md").read_text()
    registry = CollectorRegistry()
    registry.register(QueueCollector())
    ProcessMetrics({}, Inbox([], leases_good=lambda: True), registry)
    named = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}
    assert set(re.findall(r"^\| `(mysqlqueue_\w+)` \|", page, re.MULTILINE)) == named
    guide = (ROOT / "docs/howto/observe.md").read_text()
    for name in re.findall(r"mysqlqueue_\w+", guide.split("## Prometheus")[1].split("## Signals")[0]):
        assert re.sub(r"_(sum|bucket|count)$", "", name) in named or name in named, name


def test_counts_in_the_text_are_true():
    page = (ROOT / "docs/reference/monitoring.md").read_text()
    assert f"counts stop at {SCRAPES.count:,}" in page
    assert f"the {SCRAPES.groups:,} groups that are shown" in page
