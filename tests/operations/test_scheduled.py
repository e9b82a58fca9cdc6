"""What operators do with scheduled messages."""

from __future__ import annotations

import datetime
import json

from django_mysqlqueue import publish
from django_mysqlqueue.inspection import scheduled
from django_mysqlqueue.models import Operation, QueueMessage
from django_mysqlqueue.operations.scheduled import CANCEL, NOW, change_rows
from tests.support.harness import USING, sequence
from tests.support.internals import Session

ME = "ada"


def test_scheduled_messages_are_listed_moved_delivered_and_cancelled(db):
    now = Session(USING).now()
    for number in range(5):
        publish("t", number, delay=1000 * (number + 1))
    publish("u", "other", delay=50)
    publish("t", "at once")
    listed = scheduled.list_scheduled(using=USING, limit=4).rows
    assert [one.topic for one in listed] == ["u", "t", "t", "t"]
    rest = scheduled.list_scheduled(using=USING, after=(listed[-1].deliver_at, 0, listed[-1].outbox_id)).rows
    assert len(rest) == 2
    of_t = scheduled.first_scheduled(USING, topic="t", task=None, limit=50)
    assert len(of_t) == 5
    ids = [one.outbox_id for one in of_t]
    assert change_rows(USING, [ids[0], ids[0], 10**9], CANCEL, actor=ME, reason="no") == 1
    assert change_rows(USING, [ids[1]], now + 9_000_000, actor=ME) == 1
    assert change_rows(USING, [ids[2], ids[3]], NOW, actor=ME) == 2
    assert change_rows(USING, [ids[2]], CANCEL, actor=ME) == 0  # it has come due
    sequence()
    assert {json.loads(bytes(row.payload)) for row in QueueMessage.objects.all()} == {2, 3, "at once"}
    assert [one.outbox_id for one in scheduled.first_scheduled(USING, topic="t", task=None, limit=50)] == [
        ids[4],
        ids[1],
    ]
    assert list(Operation.objects.order_by("id").values_list("action", "changed")) == [
        ("cancel", 1),
        ("reschedule", 1),
        ("deliver now", 2),
    ]
    to = datetime.datetime.fromisoformat(Operation.objects.get(action="reschedule").detail.removeprefix("to "))
    assert round(to.timestamp() * 1000) == now + 9_000_000
