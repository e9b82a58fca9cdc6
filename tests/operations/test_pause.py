"""Pause and resume."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import Operation, PartitionLease
from django_mysqlqueue.operations import pausing, retrying, seeking
from django_mysqlqueue.operations.seeking import Position
from tests.app.models import Effect
from tests.support.handlers import Recorder, both_modes
from tests.support.harness import USING, Sub, handler, in_thread
from tests.support.internals import GroupRef
from tests.support.scenarios import G, log

ME = "ada"


@both_modes
def test_a_paused_group_finishes_what_it_holds_and_takes_no_more(db, mode):
    log(4, "a")
    got = Recorder()
    sub = Sub(handler(function=got, mode=mode), claim_size=2, prefetch=2)
    sub.step()
    assert pausing.set_paused(USING, G, actor=ME, reason="a bad deploy", paused=True)
    assert not pausing.set_paused(USING, G, actor=ME, paused=True)  # it is
    sub.settle()
    assert got.payloads == [0, 1]
    if mode == "ordered":
        assert PartitionLease.objects.get().leased_by == sub.name
    assert pausing.set_paused(USING, G, actor=ME, paused=False)
    assert not pausing.set_paused(USING, G, actor=ME, paused=False)
    sub.settle()
    assert got.payloads == [0, 1, 2, 3]
    assert list(Operation.objects.values_list("action", "actor", "reason", "consumer_group", "topic")) == [
        ("pause", ME, "a bad deploy", "g", "t"),
        ("resume", ME, "", "g", "t"),
    ]


def test_an_unknown_group_is_refused_and_nothing_recorded(db):
    ref = GroupRef("nobody", "t")
    for operation in (
        lambda: pausing.set_paused(USING, ref, actor=ME, paused=True),
        lambda: pausing.set_paused(USING, ref, actor=ME, paused=False),
        lambda: seeking.move(USING, ref, Position(0), actor=ME),
        lambda: seeking.preview(USING, ref, Position(0)),
        lambda: retrying.make_due(USING, ref, actor=ME),
    ):
        with pytest.raises(OperationRefused, match="no group 'nobody' on topic 't'"):
            operation()
    assert not Operation.objects.exists()


@pytest.mark.servers_only
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_operation_in_a_request_commits_by_itself_and_holds_no_lock(db, end):
    """``ATOMIC_REQUESTS``: until the response is sent every claim of the group would wait."""
    log(2, "a")
    got = Recorder()
    sub = Sub(handler(function=got))
    outer = connection.connection
    with transaction.atomic():
        Effect.objects.create(name="request")
        pausing.set_paused(USING, G, actor=ME, paused=True)
        pausing.set_paused(USING, G, actor=ME, paused=False)
        in_thread(sub.settle)
        assert got.payloads == [0, 1]
        if end == "rollback":
            transaction.set_rollback(True)
    assert connection.connection is outer
    assert Effect.objects.count() == (end == "commit")
    assert Operation.objects.count() == 2
