"""Delivering without a subscriber process."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, publish, publish_many, subscriber
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.operations import group_mode
from django_mysqlqueue.testing import _advance, deliver_all
from tests.support.harness import USING, Sub, handler, lag
from tests.support.internals import GroupRef, inline, sequencing, sessions

REF = GroupRef("g", "t")


def test_moving_time_waits_for_the_sequencer(db, monkeypatch):
    """For tests beside a real subscriber: a scheduled row that is being sequenced is not moved."""
    publish("t", 1, delay=3600)
    tries = iter([False, True])
    with monkeypatch.context() as patched:
        patched.setattr(sequencing, "take_mutex", lambda session: next(tries))
        _advance(USING, 3_600_001)
    assert Sub(handler()).settle() == 1


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_delivering_inline_refuses_a_group_of_another_mode(db, no_handlers, monkeypatch, mode):
    subscriber("t", group="g", mode=mode)(lambda delivery: None)
    other = "shared" if mode == "ordered" else "ordered"
    publish("t", 1)
    with monkeypatch.context() as patch:
        register = inline.register

        def change_behind(*args):
            register(*args)
            group_mode.set_mode(USING, REF, other, lease_ms=30_000, actor="test")

        patch.setattr(inline, "register", change_behind)
        with pytest.raises(SubscriberError, match=f"registered as {other}"):
            deliver_all()
    with pytest.raises(SubscriberError, match=f"registered as {other}"):
        deliver_all()
    assert lag() == 1


def test_a_change_of_the_mode_during_delivering_inline_does_not_hide_an_error(db, no_handlers):
    @subscriber("t", group="g")
    def handle(delivery):
        ConsumerGroup.objects.update(mode="shared")
        raise ValueError("on purpose")

    publish("t", 1)
    with pytest.raises(SubscriberError, match="registered as shared") as caught:
        deliver_all(raise_exceptions=False)
    assert str(caught.value.__cause__) == "on purpose"


def test_a_handler_may_run_handlers(db, monkeypatch):
    """As with EAGER: the inner call's end must not take away what the outer one's needs."""
    got = []
    monkeypatch.setitem(sessions._uses, GroupRef("g", "t"), {USING: 0})  # an earlier call has used the database
    inner = handler(group="inner", topic="u", function=lambda delivery: got.append("inner"))

    def function(delivery):
        publish_many("u", [Message(1, key="k")])
        sub = Sub(inner)
        sub.settle()
        got.append("outer")

    publish_many("t", [Message(1, key="k")])
    Sub(handler(function=function)).settle()
    assert got == ["inner", "outer"]
    assert lag() == 0
