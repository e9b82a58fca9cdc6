"""How long messages have been waiting, and for whom."""

from __future__ import annotations

import io
import json

import pytest
from django.core.management import call_command
from django.db.models import F

from django_mysqlqueue import publish_many
from django_mysqlqueue.models import OutboxMessage, PartitionLease, QueueMessage
from django_mysqlqueue.operations import dropping, seeking
from tests.support.harness import USING, Sub, handler, problems_found
from tests.support.health import backlog, kinds, queuestatus, register, run
from tests.support.inspected import groups_of
from tests.support.internals import GroupRef, groups

pytestmark = pytest.mark.still_clock


@pytest.mark.promise("Health")
def test_after_a_seek_messages_are_as_old_as_the_seek(db, clock):
    backlog()
    sub = Sub(handler())
    sub.settle()
    clock.advance(1200)
    sub.heart.beat()
    seeking.move(USING, GroupRef("g", "t"), seeking.position_of(USING, "earliest"), actor="ada")
    clock.advance(5)
    sub.heart.beat()
    assert kinds("--max-age", "60") == set()
    found = json.loads(run("--format", "json")[1])["groups"][0]
    assert (found["lag"]["value"], found["oldest_unacked_age"]) == (3, pytest.approx(5, abs=2))
    found = queuestatus()["groups"][0]
    assert (found["lag"], found["oldest_unacked_age"]) == (3, pytest.approx(5, abs=2))
    clock.advance(60)
    sub.heart.beat()
    assert kinds("--max-age", "60") == {("age", "g")}


def test_a_drop_that_did_not_finish_is_told(db, monkeypatch):
    backlog()
    Sub(handler())
    monkeypatch.setattr(dropping, "_delete_some", None)
    with pytest.raises(TypeError):
        dropping.drop(USING, GroupRef("g", "t"), actor="ada")
    assert kinds() == {("drop_ended_early", "g")}
    assert "A drop of g/t has not finished. If it was interrupted, run it again." in run()[1]


def test_while_a_seek_is_under_way_messages_are_as_old_as_its_begin(db, clock, monkeypatch):
    backlog()
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="latest")
    clock.advance(1200)
    Sub(handler())
    monkeypatch.setattr(seeking, "_reset_offsets", None)
    with pytest.raises(TypeError):
        seeking.move(USING, GroupRef("g", "t"), seeking.position_of(USING, "earliest"), actor="ada")
    assert "The backlog of g/t is 3" in run("--max-lag", "0")[1]
    assert kinds("--max-age", "60") == {("seek_ended_early", "g")}


def test_a_new_group_is_not_late_with_old_messages(db, clock):
    backlog()
    QueueMessage.objects.update(published_at=F("published_at") - 1_200_000)
    sub = Sub(handler())
    assert kinds("--max-age", "60") == set()
    clock.advance(100)
    sub.heart.beat()
    assert kinds("--max-age", "60") == {("age", "g")}


@pytest.mark.promise("Health")
def test_an_outbox_that_nobody_sequences_is_told(db, clock):
    """No group's lag counts it."""
    register()
    publish_many("t", range(3))
    clock.advance(5)
    code, output = run()
    assert code == 0
    assert "note     No subscriber is running; 3 messages are waiting, the oldest for " in output
    assert "\nHealthy: 1 group, backlog 0, outbox 3, the oldest message for " in output
    clock.advance(15)
    assert kinds() == {("outbox", None)}
    found = json.loads(run("--format", "json")[1])
    assert (found["outbox"]["value"], found["outbox_oldest_age"]) == (3, pytest.approx(20, abs=3))


def test_an_outbox_without_any_subscriber_is_told_at_once(db, clock):
    """As a note until it has waited."""
    publish_many("t", range(3))
    said = "3 messages are waiting to be moved into the log, but no subscriber is running."
    nobody = "note     No subscriber is running; 3 messages are waiting, the oldest for "
    assert nobody in run()[1]
    assert said in [one.text for one in problems_found()]
    clock.advance(20)
    assert ("outbox", None) in kinds()
    assert said not in [one.text for one in problems_found()]


def test_a_group_that_waits_for_the_outbox_says_so_itself(db):
    register()
    publish_many("t", range(3))
    assert {one.kind for one in problems_found()} == {"no_subscriber"}


def test_messages_for_one_group_wait_for_that_group_alone(db):
    for name in ("g", "other"):
        groups.register(USING, GroupRef(name, "t"), mode="ordered", start="earliest")
    publish_many("t", range(3))
    OutboxMessage.objects.update(target_group="other")
    assert [(group.ref.group, group.has_work) for group in groups_of()] == [("g", False), ("other", True)]
    (problem,) = problems_found()
    assert (problem.kind, problem.ref) == ("no_subscriber", GroupRef("other", "t"))
    assert problem.text.startswith("No live subscribers for other/t; 3 messages are waiting")
    publish_many("t", range(2))
    assert [group.waiting.count.value for group in groups_of()] == [2, 5]


def test_the_status_tells_of_an_outbox_that_live_subscribers_do_not_move(db, clock):
    """Another process is frozen with the sequencer's mutex: nobody's lag grows."""
    sub = Sub(handler())
    publish_many("t", range(3))
    clock.advance(20)
    sub.heart.beat()
    output = io.StringIO()
    call_command("queuestatus", stdout=output, no_color=True)
    assert "3 messages in the outbox, the oldest for 20" in output.getvalue().splitlines()[1]
    assert "The outbox is stalled: 3 messages are waiting to be moved into the log" in output.getvalue()


def test_a_lost_subscriber_is_told_only_while_that_matters(db, clock):
    backlog(1)
    alive, lost = Sub(handler(), name="alive"), Sub(handler(), name="lost")
    lost.step()
    clock.advance(100)
    alive.heart.beat()
    assert f"Subscriber {lost.name} of g/t is lost" in run()[1], "it holds what nobody has taken over yet"
    alive.settle()
    assert " is lost" not in run()[1]
    PartitionLease.objects.create(consumer_group="g", topic="t", partition_key="x", leased_by=lost.name)
    assert f"Subscriber {lost.name} of g/t is lost" in run()[1], "a partition without work has its name yet"
    PartitionLease.objects.all().delete()
    assert " is lost" not in run()[1]
    assert any(not row.live for row in groups_of(using=USING)[0].subscribers), "still on its page"
    backlog(1)
    assert f"Subscriber {lost.name} of g/t is lost" in run()[1]
