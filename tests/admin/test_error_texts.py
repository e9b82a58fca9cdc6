"""Texts of errors of jobs need the permission to see payloads: on every page, in every format."""

from __future__ import annotations

import datetime
from html import unescape

import pytest
from django.contrib.auth.models import User

from django_mysqlqueue import Message, operations, publish_many
from django_mysqlqueue.admin.pages import PAGES
from django_mysqlqueue.models import DeliveryEvent, DeliveryState, OutboxMessage, QueueMessage
from tests.app import jobs
from tests.support import job_worlds
from tests.support.dashboard import ROOT, confirm
from tests.support.factories import QuarantinedMessageFactory
from tests.support.harness import Sub, handler, sequence
from tests.support.internals import registry
from tests.support.job_worlds import JOBS
from tests.support.topic_permissions import OnTopics

HIDDEN = "(errors of jobs are hidden)"
TEXT = "secret text"
"""What texts of errors of jobs contain; those of the topic ``t`` contain "open text"."""
LATER = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture
def world(db, no_handlers, settings):
    """Jobs and messages that wait for another attempt or are dead letters. Returns query strings of pages of jobs."""
    settings.TASKS = job_worlds.TASKS
    publish_many("t", [Message(number, key="k") for number in range(2)])
    sub = Sub(registry.handlers()[JOBS], handler(function=_fail), threads=9)
    jobs.fail_with.enqueue(TEXT)
    jobs.fail_slowly.enqueue()
    while not QueueMessage.objects.filter(topic="jobs.default_dlq").exists():
        sub.settle()
        sequence()
    error = f"Traceback (most recent call last):\nbuiltins.KeyError: {TEXT}\n"
    waits = DeliveryState.objects.get(consumer_group="jobs", acked=False)
    DeliveryState.objects.filter(message_offset=waits.message_offset).update(last_error=error, retry_count=9)
    DeliveryEvent.objects.filter(message_offset=waits.message_offset).update(error=error)
    dead = QueueMessage.objects.get(topic="jobs.default_dlq")
    operations.retry(*JOBS, error=TEXT, at=LATER, actor="ada")
    OutboxMessage.objects.all().delete()
    QuarantinedMessageFactory(topic=JOBS.topic, reason=TEXT)
    return {
        "quarantine": [{}, {"topic": JOBS.topic}],
        "deadletters": [
            *({}, {"topic": JOBS.topic}, {"state": "retrying"}, {"group": "jobs"}),
            {"topic": JOBS.topic, "format": "csv"},
        ],
        "deadletter": [{"offset": dead.offset}],
        "message": [{"offset": dead.offset}, {"offset": dead.original_offset}, {"offset": waits.message_offset}],
        "group": [{"group": "jobs", "topic": JOBS.topic}],
        "job": [{"id": dead.original_id}],
        "tasks": [{}],
        "operations": [{}, {"topic": JOBS.topic}, {"format": "csv"}],
    }


def _fail(delivery):
    if delivery.payload:
        delivery.nack(3600, "open text")
    else:
        delivery.reject("open text")


def read(client, page, query):
    answer = client.get(f"{ROOT}{page}/", query)
    assert answer.status_code == 200, (page, query)
    return unescape((answer.getvalue() if answer.streaming else answer.content).decode())


@pytest.fixture
def make(make_client, settings):
    """Makes the client of a user, with permissions in general, and on the topic of jobs."""
    settings.AUTHENTICATION_BACKENDS = ["tests.support.topic_permissions.OnTopics"]
    OnTopics.granted.clear()

    def one(*permissions, on=()):
        client = make_client(*permissions)
        name = User.objects.latest("pk").username
        OnTopics.granted.update((name, f"django_mysqlqueue.{permission}", JOBS.topic) for permission in on)
        return client

    return one


@pytest.mark.promise("Permissions by topic")
def test_each_page_shows_texts_of_errors_of_jobs_with_the_permission_alone(make, world):
    everything = make("view_dashboard", "view_operation", "operate_dashboard", "see_payloads")
    one_topic = make("view_dashboard", "view_operation", "operate_dashboard", on=["see_payloads"])
    other = make("view_dashboard", "view_operation", "operate_dashboard")
    for page, queries in world.items():
        for query in queries:
            for client in (everything, one_topic):
                assert TEXT in read(client, page, query), (page, query)
            text = read(other, page, query)
            assert TEXT not in text, (page, query)
            assert HIDDEN in text or page == "job", (page, query)


@pytest.mark.promise("Permissions by topic")
def test_no_page_at_all_shows_them_without_the_permission(make, world):
    """A new page, too."""
    client = make("view_dashboard", "view_operation", "operate_dashboard", "publish_messages")
    for page in PAGES:
        for query in (*world.get(page.name, ()), {"group": "jobs", "topic": JOBS.topic}, {"topic": JOBS.topic}, {}):
            address = ROOT if page.name == "changelist" else f"{ROOT}{page.name}/"
            answer = client.get(address, query)
            text = (answer.getvalue() if answer.streaming else answer.content).decode()
            assert "secret" not in text, (page, query)


@pytest.mark.promise("Permissions by topic")
def test_texts_of_errors_of_other_topics_are_shown(make, world):
    client = make("view_dashboard")
    offsets = QueueMessage.objects.filter(topic="t").order_by("offset").values_list("offset", flat=True)
    for page, query in (
        ("deadletters", {}),
        ("deadletters", {"topic": "t"}),
        ("deadletters", {"topic": "t", "format": "csv"}),
        *(("message", {"offset": offset}) for offset in offsets),
        ("group", {"group": "g", "topic": "t"}),
    ):
        assert "open text" in read(client, page, query), (page, query)


@pytest.mark.promise("Permissions by topic")
def test_hidden_errors_of_a_group_are_one_kind_and_can_be_operated_on(make, world):
    client = make("view_dashboard", "operate_dashboard")
    (kind,) = [row.kind for row in client.get(f"{ROOT}deadletters/").context["kinds"].rows if row.kind.ref == JOBS]
    assert (kind.text, str(kind.retrying), str(kind.dead_letters)) == (HIDDEN, "1", "1")
    given = {"group": "jobs", "topic": JOBS.topic, "upto": str(kind.offset)}
    for guess in ("builtins.KeyError: secret text", "KeyError: secret text"):
        text = client.post(f"{ROOT}do/retry-error/", {**given, "kind": guess, "asked": "yes"}).content.decode()
        assert "No retrying message has this error." in text
    (said,) = confirm(client, "retry-error", **given, kind=HIDDEN)
    assert "1" in said
    wanted = {"topic": "jobs.default_dlq", "upto": str(10**9), "asked": "yes"}
    for guess, matches in (("ValueError: secret text", False), (HIDDEN, True)):
        text = client.post(f"{ROOT}do/redrive/", {**wanted, "kind": guess}).content.decode()
        assert ("There are no such dead letters." in text) is not matches


@pytest.mark.promise("Permissions by topic")
def test_hidden_errors_are_not_searched(make, world):
    """Repeated searches would reveal them."""
    other, sees = (make("view_dashboard", "operate_dashboard", on=on) for on in ((), ["see_payloads"]))
    given = {"group": "jobs", "topic": JOBS.topic, "error": "secret", "time": "2100-01-01T00:00:00", "asked": "yes"}
    dead = {"topic": "jobs.default_dlq", "error": "secret", "upto": str(10**9), "reason": "test", "asked": "yes"}
    for client, status in ((other, 403), (sees, 200)):
        assert client.get(f"{ROOT}deadletters/", {"topic": JOBS.topic, "error": "secret"}).status_code == status
        for name, values in (("retry", given), ("redrive", dead), ("discard", dead)):
            assert client.post(f"{ROOT}do/{name}/", values).status_code == status, name
    assert 'name="error"' not in read(other, "deadletters", {"topic": JOBS.topic})
    assert other.get(f"{ROOT}deadletters/", {"topic": "t", "error": "open"}).status_code == 200
