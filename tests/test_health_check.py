"""The check for django-health-check."""

from __future__ import annotations

import asyncio

import pytest
from django.db import OperationalError, connections
from django.test import Client
from django.urls import path
from health_check.exceptions import ServiceUnavailable
from health_check.views import HealthCheckView

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.health import QueueHealth
from django_mysqlqueue.models import DeliveryState, SubscriberHeartbeat
from tests.support.harness import USING, Sub, handler, in_thread
from tests.support.health import backlog, register
from tests.support.internals import GroupRef, Subset, groups

urlpatterns = [
    path(
        "health/",
        HealthCheckView.as_view(
            checks=[("django_mysqlqueue.health.QueueHealth", {"max_lag": 2}), "health_check.checks.Database"]
        ),
    )
]


def result(**options):
    return asyncio.run(QueueHealth(**options).get_result())


def test_the_check(db):
    backlog()
    Sub(handler())
    assert QueueHealth(max_lag=3).run() is None
    with pytest.raises(ServiceUnavailable, match="The backlog of g/t is 3; the limit is 2"):
        QueueHealth(max_lag=2).run()
    with pytest.raises(ServiceUnavailable, match="g/t has 1 live subscriber; the minimum is 2"):
        QueueHealth(min_subscribers=2).run()
    with pytest.raises(ServiceUnavailable, match="No group 'x' is registered"):
        QueueHealth(groups=["x"]).run()
    everything = QueueHealth(max_lag=3, topics=["t"], groups=["g"], max_age=60, max_dead_letters=0)
    assert everything.run() is None
    assert "max_lag=3" in repr(everything), "reports tell checks apart by it"


@pytest.mark.parametrize(
    "options",
    [
        {"max_lag": -1},
        {"max_age": "5"},
        {"max_lag": 1.5},
        {"min_subscribers": True},
        {"max_recent_dead_letters": -1},
        {"max_failure_ratio": 1.5},
        {"min_attempts": 0},
        {"window": 59},
    ],
)
def test_bad_limits_are_refused_at_once(options):
    with pytest.raises(OperationRefused, match="must be"):
        QueueHealth(**options)


def test_its_words_name_no_key(db, clock):
    """Pages of health checks are often public, and keys are often people."""
    backlog()
    sub = Sub(handler(), subset=Subset.parse(["other-*"], None))
    clock.advance(100)
    sub.heart.beat()
    with pytest.raises(ServiceUnavailable) as caught:
        QueueHealth().run()
    assert str(caught.value) == "Unavailable: g/t: unserved."
    assert SubscriberHeartbeat.objects.exists()
    assert DeliveryState.objects.count() == 0


def test_an_error_of_the_database_is_told_without_its_text(db, monkeypatch):
    def fail(*_, **__):
        raise OperationalError("user root, password secret")

    monkeypatch.setattr("django_mysqlqueue.inspection.health.get_overview", fail)
    with pytest.raises(ServiceUnavailable) as caught:
        QueueHealth().run()
    assert str(caught.value) == "Unavailable: The database 'default' reports an error."


def test_its_thread_keeps_no_connection(db):
    register()

    def check():
        QueueHealth().run()
        return connections[USING].connection

    assert in_thread(check) is None


# -- several databases ----------------------------------------------------------

TOPICS = {"orders": {"DATABASE": "queue"}}


@pytest.fixture
def topics(queue_db, settings):
    settings.MYSQLQUEUE = {"TOPICS": TOPICS}
    for topic, alias in (("t", USING), ("orders", "queue")):
        groups.register(alias, GroupRef("g", topic), mode="ordered", start="earliest")
    groups.register("queue", GroupRef("late", "orders"), mode="ordered", start="earliest")


def test_all_databases_are_checked(topics):
    assert QueueHealth().run() is None
    with pytest.raises(ServiceUnavailable) as caught:
        QueueHealth(min_subscribers=1).run()
    assert str(caught.value) == "Unavailable: " + " ".join(
        f"Database {alias!r}: {ref} has 0 live subscribers; the minimum is 1."
        for alias, ref in (("default", "g/t"), ("queue", "g/orders"), ("queue", "late/orders"))
    )
    with pytest.raises(ServiceUnavailable, match=r"^Unavailable: late/orders has 0 live subscribers; the minimum is 1"):
        QueueHealth(min_subscribers=1, topics=["orders"], groups=["late"]).run()
    with pytest.raises(ServiceUnavailable, match=r"^Unavailable: g/t has 0 live"):
        QueueHealth(min_subscribers=1, using=USING).run()


def test_a_group_may_be_in_any_database(topics):
    assert QueueHealth(groups=["late"]).run() is None
    with pytest.raises(ServiceUnavailable, match=r"^Unavailable: Database 'queue': late/orders has 0 live"):
        QueueHealth(groups=["late"], min_subscribers=1).run()
    with pytest.raises(ServiceUnavailable, match=r"No group 'x' is registered\. Registered: g, late"):
        QueueHealth(groups=["x"]).run()


def test_a_database_that_cannot_be_read_is_named(topics, settings):
    """The alias ``other`` has no tables. What is wrong in the others is told too."""
    settings.MYSQLQUEUE = {"TOPICS": {**TOPICS, "lost": {"DATABASE": "other"}}}
    with pytest.raises(ServiceUnavailable) as caught:
        QueueHealth(min_subscribers=1, groups=["late"]).run()
    assert str(caught.value) == (
        "Unavailable: Database 'queue': late/orders has 0 live subscribers; the minimum is 1. "
        "The database 'other' lacks a table or column of the queue; run manage.py migrate --database other."
    )
    assert QueueHealth(topics=["orders"]).run() is None
    with pytest.raises(ServiceUnavailable, match=r"^Unavailable: The database 'other' lacks"):
        QueueHealth(groups=["x"]).run()  # It may be registered there.


def test_the_check_of_several_keeps_no_connection(topics):
    def check():
        QueueHealth().run()
        return [connections[alias].connection for alias in (USING, "queue")]

    assert in_thread(check) == [None, None]


def test_in_the_view(db, settings):
    settings.ROOT_URLCONF = __name__
    Sub(handler())
    client = Client()

    def get():
        response = client.get("/health/?format=json")
        return response.status_code, [text for check, text in response.json().items() if "QueueHealth" in check]

    assert get() == (200, ["OK"])
    backlog()
    assert get() == (500, ["Unavailable: The backlog of g/t is 3; the limit is 2."])
    assert result(max_lag=2).error is not None
    assert result(max_lag=3).error is None
