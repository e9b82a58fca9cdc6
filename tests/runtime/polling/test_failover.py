"""A log that lost messages in a failover."""

from __future__ import annotations

from django_mysqlqueue import publish, publish_many
from django_mysqlqueue.models import QueueMessage
from tests.support import garbage
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler
from tests.support.internals import Session


def test_an_emptied_log_is_no_failover(db, settings, caplog):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    publish("t", 1)
    sub = Sub(handler())
    sub.settle()
    garbage.collect(USING)
    assert not QueueMessage.objects.exists()
    tail = sub.poller._tail
    sub.poller.check_tail(Session(USING))
    assert sub.poller._tail == tail


def test_a_log_that_went_back_is_read_again(db):
    from django_mysqlqueue.models import Sequencer

    publish_many("t", range(3))
    got = Recorder()
    sub = Sub(handler(function=got))
    sub.settle()
    # A replica that had not got everything has become the primary.
    first = QueueMessage.objects.order_by("offset").first().offset
    QueueMessage.objects.filter(offset__gt=first).delete()
    Sequencer.objects.update(last_offset=first)
    sub.poller.check_tail(Session(USING))
    assert sub.poller._tail is None
