"""A row of the outbox that the log refuses goes to the quarantine, alone, and the log goes on."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import OutboxMessage, QuarantinedMessage, QueueMessage
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import sequencing

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def refusing():
    """A trigger of a user on the log, which refuses the payload ``"bad"``."""
    with connection.cursor() as cursor:
        cursor.execute(trigger())
    yield
    drop()


def trigger():
    if connection.vendor == "sqlite":
        return (
            "CREATE TRIGGER refusing BEFORE INSERT ON queue_messages WHEN NEW.payload = X'2262616422' "
            "BEGIN SELECT RAISE(ABORT, 'no bad ones'); END"
        )
    return (
        "CREATE TRIGGER refusing BEFORE INSERT ON queue_messages FOR EACH ROW IF NEW.payload = X'2262616422' THEN "
        "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no bad ones'; END IF"
    )


def drop():
    with connection.cursor() as cursor:
        cursor.execute("DROP TRIGGER IF EXISTS refusing")


def contents(model):
    return [bytes(one) for one in model.objects.order_by("pk").values_list("payload", flat=True)]


@pytest.mark.promise("Quarantine")
@pytest.mark.parametrize("places", [(0,), (3,), (9,), (0, 1, 9), tuple(range(10))])
@pytest.mark.parametrize("delay", [0, 0.001])
def test_only_the_rows_that_the_log_refuses_are_set_aside(refusing, places, delay):
    values = ["bad" if n in places else n for n in range(10)]
    publish_many("t", [Message(one, key=f"k{n % 2}", delay=delay) for n, one in enumerate(values)])
    while not QueueMessage.objects.exists() and OutboxMessage.objects.exists():
        done = sequencing.sequence(USING)
    assert (done.moved, done.quarantined) == (10, len(places))
    assert contents(QueueMessage) == [b"%d" % n for n in range(10) if n not in places]
    assert not OutboxMessage.objects.exists()
    assert contents(QuarantinedMessage) == [b'"bad"'] * len(places)
    one = QuarantinedMessage.objects.first()
    assert "no bad ones" in one.reason
    assert one.quarantined_at > 0
    publish("t", "next")
    got = []
    Sub(handler(function=lambda delivery: got.append(delivery.payload))).settle()
    assert sorted(map(str, got)) == sorted([*(str(n) for n in range(10) if n not in places), "next"])


def test_the_quarantine_has_all_columns_of_the_row(refusing):
    publish("t", "bad", key="a", id="i", priority=7, expires_in=1000, coalesce="c", metadata={"m": 1})
    before = OutboxMessage.objects.values().get()
    sequence()
    after = QuarantinedMessage.objects.values().get()
    assert before.pop("outbox_id")
    assert {name: after[name] for name in before} == before


def test_a_pass_without_such_rows_sends_no_further_statement(refusing):
    publish("t", 1)
    with CaptureQueriesContext(connection) as captured:
        sequencing.sequence(USING)
    assert not [one["sql"] for one in captured.captured_queries if "SAVEPOINT" in one["sql"]]


def test_another_error_sets_nothing_aside(refusing, monkeypatch):
    publish_many("t", ["bad", 1])

    def fail(*arguments, **options):
        raise OperationalError(1114, "The table 'queue_messages' is full")

    monkeypatch.setattr(sequencing, "_append", fail)
    with pytest.raises(OperationalError):
        sequencing.sequence(USING)
    assert OutboxMessage.objects.count() == 2
    assert not QuarantinedMessage.objects.exists()
