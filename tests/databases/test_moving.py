"""Moving a topic to another database, while messages are published and handled."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
from django.core.management import CommandError
from django.test import override_settings

from django_mysqlqueue import cancel, operations, publish, publish_many, reschedule
from django_mysqlqueue.exceptions import InvalidMessage, OperationRefused
from django_mysqlqueue.inspection import find_problems, get_overview
from django_mysqlqueue.models import ConsumerGroup, Operation, OutboxMessage, QueueMessage, SubscriberHeartbeat
from django_mysqlqueue.names import rules
from django_mysqlqueue.operations import dropping, moving
from tests.support.commands import table
from tests.support.harness import Sub, handler
from tests.support.internals import (
    GroupRef,
    Route,
    Session,
    close_connections,
    groups,
    queue_aliases,
    register,
    registering,
    relay,
    route_of,
    run,
    sequence,
    set_route,
    works_on,
)
from tests.support.processes import Worker, assert_ordered, effects, wait_for
from tests.support.queue_alias import command

OLD, NEW = "default", "queue"
BEFORE = {"TOPICS": {}}
AFTER = {"TOPICS": {"p.plain": {"DATABASE": NEW, "VIA": OLD}, "t": {"DATABASE": NEW, "VIA": OLD}}}
BACK = {"TOPICS": {"t": {"DATABASE": OLD, "VIA": OLD, "MOVES_FROM": NEW}}}
REF = GroupRef("g", "t")
BY = {"actor": "ada"}


@pytest.fixture(autouse=True)
def _db(queue_db):
    """Both databases, empty."""


def topics(alias):
    sequence(alias)
    return list(QueueMessage.objects.using(alias).order_by("offset").values_list("topic", flat=True))


class Waits(Exception):
    """The operation waits for somebody else."""


@pytest.fixture
def waits(monkeypatch):
    def sleep(seconds):
        raise Waits

    monkeypatch.setattr(moving, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))


def prepare(settings):
    """A topic with a message in the outbox, which is prepared to move."""
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    publish("t", 1)
    operations.prepare_move("t", NEW, **BY)


# -- step by step -------------------------------------------------------------


def test_until_it_moves_a_prepared_topic_stays(settings):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    publish("t", 1)
    result = operations.prepare_move("t", NEW, **BY)
    assert "prepared to move from the database default to queue" in result.summary[0]
    assert route_of(Session(OLD), "t") == Route("", OLD, NEW)
    (group,) = ConsumerGroup.objects.using(NEW)
    assert (group.consumer_group, group.paused, group.start_offset) == ("g", True, 0)
    settings.MYSQLQUEUE = AFTER
    publish("t", 2)
    publish("t.t", 3)
    assert OutboxMessage.objects.filter(topic="t@queue").count() == 1
    assert topics(OLD) == ["t", "t", "t.t"]
    register(NEW, {REF: handler()})
    register(OLD, {REF: handler()})
    assert groups.find(NEW, REF).paused  # A subscriber that starts does not change that.


def test_from_the_cut_on_all_messages_go_to_the_new_database(settings, waits):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    operations.prepare_move("t", NEW, **BY)
    publish("t", 1)
    settings.MYSQLQUEUE = AFTER
    sequence(OLD)
    with pytest.raises(Waits):
        operations.move_topic("t", NEW, **BY)
    publish("t", 2)
    with override_settings(MYSQLQUEUE=BEFORE):
        publish("t", 3)  # A publisher that has not been restarted.
    assert topics(OLD) == ["t", "t@queue", "t@queue"]
    assert relay(OLD, NEW).messages == 2
    assert topics(NEW) == ["t", "t"]
    assert groups.find(NEW, REF).paused
    QueueMessage.objects.filter(topic="t").delete()  # Everything is settled.
    result = operations.move_topic("t", NEW, **BY)
    assert result.changed == 1
    assert not groups.find(NEW, REF).paused
    assert groups.find(OLD, REF) is None
    details = Operation.objects.filter(action="move").order_by("id").values_list("detail", flat=True)
    assert [detail.split(",")[0] for detail in details][:2] == ["messages go to default", "messages go to queue"]


def test_a_move_stops_if_the_cut_is_lost_while_it_waits(settings, monkeypatch):
    """The database of the publishers has failed over to a replica that lacked it, so messages stay."""
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    publish("t", 1)
    sequence(OLD)
    operations.prepare_move("t", NEW, **BY)
    prepared = route_of(Session(OLD), "t")
    settings.MYSQLQUEUE = AFTER

    def sleep(seconds):
        run(OLD, lambda session: set_route(session, "t", prepared))
        QueueMessage.objects.filter(topic="t").delete()  # Everything is settled.

    monkeypatch.setattr(moving, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    with pytest.raises(OperationRefused, match="no longer sends the topic 't' to 'queue'"):
        operations.move_topic("t", NEW, **BY)
    assert groups.find(OLD, REF) is not None
    monkeypatch.undo()
    settings.MYSQLQUEUE = AFTER
    operations.move_topic("t", NEW, **BY)
    assert groups.find(OLD, REF) is None


@pytest.mark.parametrize("step", ["_begin", "_delete_some", "_end"])
def test_a_move_that_is_killed_while_it_drops_a_group_is_run_again(settings, waits, monkeypatch, step):
    """The positions of the group may have been deleted, and the log has its messages still."""
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    publish("t", 1)
    assert work(OLD) == [1]
    operations.prepare_move("t", NEW, **BY)
    settings.MYSQLQUEUE = AFTER
    with monkeypatch.context() as patched:
        patched.setattr(dropping, step, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            operations.move_topic("t", NEW, **BY)
    operations.move_topic("t", NEW, **BY)
    assert groups.find(OLD, REF) is None
    assert not groups.find(NEW, REF).paused


def test_a_move_that_is_killed_when_all_groups_have_moved_is_run_again(settings, monkeypatch):
    """The command shows first what it will do."""
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    operations.prepare_move("t", NEW, **BY)
    settings.MYSQLQUEUE = AFTER
    with monkeypatch.context() as patched:
        patched.setattr(moving, "finish", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            operations.move_topic("t", NEW, **BY)
    assert groups.find(OLD, REF) is None
    text = command("queuemove", "t", "--to", NEW, "--noinput")
    assert "The topic t has moved from the database default to queue." in text


def work(alias):
    """What the group gets in a database."""
    got = []
    sub = Sub(handler(function=lambda delivery: got.append(delivery.payload)), name=alias, using=alias)
    sub.settle()
    sub.leave()
    return got


def move(target, after, before=BEFORE):
    """Both steps, with nothing to wait for."""
    with override_settings(MYSQLQUEUE=before):
        operations.prepare_move("t", target, **BY)
    with override_settings(MYSQLQUEUE=after):
        operations.move_topic("t", target, **BY)


def test_there_and_back_and_there_again(settings):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    publish("t", 1)
    assert work(OLD) == [1]
    move(NEW, AFTER)
    move(OLD, BACK, AFTER)
    assert work(OLD) == []  # What it has settled in its earlier stay is not delivered again.
    settings.MYSQLQUEUE = BACK
    publish("t", 2)
    assert work(OLD) == [2]
    move(NEW, AFTER, BACK)
    settings.MYSQLQUEUE = AFTER
    publish("t", 3)
    sequence(OLD)
    assert relay(OLD, NEW).messages == 1
    assert work(NEW) == [3]


def test_subscribers_work_on_the_database_that_a_topic_leaves(settings):
    settings.MYSQLQUEUE = BACK
    assert works_on("t") == [OLD, NEW]
    assert queue_aliases() == [OLD, NEW]
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    move(NEW, AFTER)
    settings.MYSQLQUEUE = AFTER
    result = operations.prepare_move("t", OLD, **BY)
    assert "{'DATABASE': 'default', 'VIA': 'default', 'MOVES_FROM': 'queue'}" in result.summary[-1]
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"DATABASE": OLD, "VIA": OLD}}}
    with pytest.raises(OperationRefused, match="Deploy MOVES_FROM = 'queue'"):
        operations.move_topic("t", OLD, **BY)


def test_a_group_that_is_resumed_while_it_waits_moves(settings, monkeypatch):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    operations.pause("g", "t", **BY)
    operations.prepare_move("t", NEW, **BY)
    publish("t", 1)
    sequence(OLD)
    settings.MYSQLQUEUE = AFTER

    def sleep(seconds):
        operations.resume("g", "t", using=OLD, **BY)
        assert work(OLD) == [1]

    monkeypatch.setattr(moving, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    operations.move_topic("t", NEW, **BY)
    assert not groups.find(NEW, REF).paused


def test_a_move_must_be_finished_before_the_way_back(settings, waits):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    operations.prepare_move("t", NEW, **BY)
    publish("t", 1)
    sequence(OLD)
    settings.MYSQLQUEUE = AFTER
    with pytest.raises(Waits):
        operations.move_topic("t", NEW, **BY)
    with pytest.raises(OperationRefused, match="has not left the database 'default': finish its move to 'queue' first"):
        operations.prepare_move("t", OLD, **BY)
    assert not groups.find(OLD, REF).paused


def test_nobody_resumes_or_seeks_a_group_that_waits(settings):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    publish("t", 1, key="k")
    sequence(OLD)
    operations.prepare_move("t", NEW, **BY)
    seek = partial(operations.seek, position="latest")
    for operate in (operations.resume, operations.pause, operations.drop_group, seek):
        with pytest.raises(OperationRefused, match="waits until it has settled all messages in the database that its"):
            operate("g", "t", using=NEW, **BY)
    assert groups.find(NEW, REF).paused


def test_a_group_that_was_dropped_in_the_old_database_does_not_move(settings):
    prepare(settings)
    settings.MYSQLQUEUE = AFTER
    operations.drop_group("g", "t", using=OLD, **BY)
    operations.move_topic("t", NEW, **BY)
    assert groups.find(NEW, REF) is None


def test_a_group_that_is_dropped_during_the_move_does_not_wait_for_ever(settings, monkeypatch):
    prepare(settings)
    sequence(OLD)
    settings.MYSQLQUEUE = AFTER
    cut = moving.cut
    monkeypatch.setattr(
        moving, "cut", lambda move, **how: (cut(move), operations.drop_group("g", "t", using=OLD, **BY))[0]
    )
    operations.move_topic("t", NEW, **BY)
    assert not groups.find(NEW, REF).paused
    operations.pause("g", "t", using=NEW, **BY)  # Nothing is unfinished.


def test_a_cancelled_move(settings):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    publish("t", 1)
    sequence(OLD)
    with pytest.raises(OperationRefused, match="The topic 't' is not prepared to move to 'queue'"):
        operations.cancel_move("t", NEW, **BY)
    operations.prepare_move("t", NEW, **BY)
    with override_settings(MYSQLQUEUE=AFTER), pytest.raises(OperationRefused, match="Deploy the earlier settings"):
        operations.cancel_move("t", NEW, **BY)
    assert "Groups that will be deleted in queue: g." in operations.cancel_move("t", NEW, **BY, dry_run=True).summary[0]
    assert groups.find(NEW, REF) is not None
    assert operations.cancel_move("t", NEW, **BY).changed == 1
    assert groups.find(NEW, REF) is None
    assert route_of(Session(OLD), "t") is None
    assert work(OLD) == [1]
    move(NEW, AFTER)  # It can be prepared and moved again.
    assert groups.find(OLD, REF) is None


def test_a_move_that_has_begun_is_not_cancelled(settings, waits):
    prepare(settings)
    sequence(OLD)
    with override_settings(MYSQLQUEUE=AFTER), pytest.raises(Waits):
        operations.move_topic("t", NEW, **BY)
    with pytest.raises(OperationRefused, match="The topic 't' has begun to move to 'queue': finish the move"):
        operations.cancel_move("t", NEW, **BY)
    assert groups.find(NEW, REF) is not None


def test_a_move_is_not_cancelled_if_that_would_lose_messages(settings):
    prepare(settings)
    publish("t", 2, using=NEW)
    sequence(NEW)
    for dry_run in (True, False):
        with pytest.raises(OperationRefused, match="The database 'queue' has messages for the group 'g' on topic 't'"):
            operations.cancel_move("t", NEW, **BY, dry_run=dry_run)
    assert route_of(Session(OLD), "t") is not None
    move(NEW, AFTER)
    assert work(NEW) == [2]


def test_a_cut_that_was_interrupted_is_cancelled(settings, monkeypatch):
    prepare(settings)
    with monkeypatch.context() as patched, override_settings(MYSQLQUEUE=AFTER):
        patched.setattr(moving, "_set_route", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            operations.move_topic("t", NEW, **BY)
    assert route_of(Session(NEW), "t") == Route("", OLD)
    operations.cancel_move("t", NEW, **BY)
    assert route_of(Session(NEW), "t") is None
    operations.prepare_move("t", NEW, **BY)
    publish("t", 2, using=NEW, delay=600)  # As an earlier stay may have left it.
    run(NEW, lambda session: set_route(session, "t", Route("", OLD)))
    operations.cancel_move("t", NEW, **BY)
    assert route_of(Session(NEW), "t") == Route(OLD, NEW)


def test_a_move_that_is_cancelled_before_the_cut(settings, monkeypatch):
    """By somebody else; what decides is the route under the mutex."""
    prepare(settings)
    register_again = moving.register

    def then_cancel(move):
        register_again(move)
        with override_settings(MYSQLQUEUE=BEFORE):
            operations.cancel_move("t", NEW, **BY)

    with monkeypatch.context() as patched, override_settings(MYSQLQUEUE=AFTER):
        patched.setattr(moving, "register", then_cancel)
        with pytest.raises(OperationRefused, match="The topic 't' is not prepared to move to 'queue' any more"):
            operations.move_topic("t", NEW, **BY)
    assert work(OLD) == [1]


def test_a_move_that_begins_before_it_is_cancelled(settings, monkeypatch, waits):
    prepare(settings)
    sequence(OLD)
    check = moving.check_cancel

    def then_move(move):
        check(move)
        with override_settings(MYSQLQUEUE=AFTER), pytest.raises(Waits):
            operations.move_topic("t", NEW, **BY)

    with monkeypatch.context() as patched:
        patched.setattr(moving, "check_cancel", then_move)
        with pytest.raises(OperationRefused, match="has begun to move to 'queue': finish the move"):
            operations.cancel_move("t", NEW, **BY)
    assert groups.find(NEW, REF) is not None


def test_a_cancel_that_is_refused_keeps_the_plan(settings, monkeypatch):
    """Messages have arrived between the check and the removal of the plan."""
    prepare(settings)
    check = moving.check_cancel
    calls = []

    def late(move):
        calls.append(move)
        check(move)
        if len(calls) == 1:
            publish("t", 2, using=NEW)
            sequence(NEW)

    with monkeypatch.context() as patched:
        patched.setattr(moving, "check_cancel", late)
        with pytest.raises(OperationRefused, match="has messages for the group 'g'"):
            operations.cancel_move("t", NEW, **BY)
    assert route_of(Session(OLD), "t") == Route("", OLD, NEW)
    assert work(OLD) == [1]
    with override_settings(MYSQLQUEUE=AFTER):
        operations.move_topic("t", NEW, **BY)
    assert work(NEW) == [2]


def test_an_interrupted_cancel_is_run_again(settings, monkeypatch):
    prepare(settings)
    with monkeypatch.context() as patched:
        patched.setattr(dropping, "drop", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            operations.cancel_move("t", NEW, **BY)
    operations.cancel_move("t", NEW, **BY)
    assert groups.find(NEW, REF) is None
    assert route_of(Session(OLD), "t") is None


def test_queues_of_jobs_do_not_move(settings):
    settings.TASKS = {"default": {"BACKEND": "django_mysqlqueue.tasks.MySQLQueueBackend"}}
    with pytest.raises(OperationRefused, match="is a queue of jobs, whose results would not move with it"):
        operations.prepare_move("jobs.default", NEW, **BY)


def test_a_group_with_an_unfinished_drop_or_seek_is_not_made_to_wait(settings):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    publish("t", 1)
    ConsumerGroup.objects.using(NEW).create(
        consumer_group="g", topic="t", mode="ordered", paused=True, after_seek="dropped", operation=5
    )
    with pytest.raises(OperationRefused, match="A drop of the group 'g' on topic 't' has not finished"):
        operations.prepare_move("t", NEW, **BY)
    assert ConsumerGroup.objects.using(NEW).get().after_seek == "dropped"
    assert route_of(Session(OLD), "t") is None


def test_a_topic_is_prepared_for_one_database_at_a_time(settings):
    prepare(settings)
    with pytest.raises(OperationRefused, match=r"is prepared to move to 'queue'\. Move it, or cancel that first"):
        operations.prepare_move("t", "other", **BY)


def test_a_process_with_old_settings_does_not_register_the_group_again(settings, caplog):
    """It would be given all messages that the log still has."""
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    publish("t", 1)
    assert work(OLD) == [1]
    move(NEW, AFTER)
    register(OLD, {REF: handler()})
    assert groups.find(OLD, REF) is None
    assert "group.moved group=g topic=t database=default target=queue" in caplog.text
    caplog.clear()
    with patch.object(registering, "subscriptions", lambda: {REF: handler()}):
        registering.register_groups(OLD)
    assert groups.find(OLD, REF) is None
    assert "group.moved" in caplog.text


def idle_subscriber(mode):
    """One that has handled a message of the partition k in the old database."""
    publish("t", 1, key="k")
    sub = Sub(handler(mode=mode), using=OLD)
    assert sub.settle() == 1
    SubscriberHeartbeat.objects.all().delete()  # It does not tell its release.
    return sub


def stopped_for(sub, caplog):
    """The level and the text of what it logs when it learns of a new message."""
    with caplog.at_level("INFO", "django_mysqlqueue"):
        for _ in range(3):
            sub.poller.groups[0].notify(["k"])
            sub.step()
    return [(one.levelname, one.getMessage()) for one in caplog.records if one.getMessage().startswith("group.")]


@pytest.mark.parametrize("mode", ["ordered", "shared"])
@pytest.mark.parametrize(("deployed", "level"), [(BEFORE, "ERROR"), (AFTER, "INFO")], ids=["old settings", "new"])
def test_a_subscriber_that_finds_its_group_moved_says_so(settings, caplog, mode, deployed, level):
    settings.MYSQLQUEUE = BEFORE
    sub = idle_subscriber(mode)
    move(NEW, AFTER)
    settings.MYSQLQUEUE = deployed
    assert stopped_for(sub, caplog) == [(level, "group.moved group=g topic=t database=default target=queue")]


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_subscriber_that_finds_its_group_dropped_says_so(settings, caplog, mode):
    """A move that is only prepared is not the reason."""
    settings.MYSQLQUEUE = BEFORE
    sub = idle_subscriber(mode)
    operations.prepare_move("t", NEW, **BY)
    operations.drop_group("g", "t", using=OLD, **BY)
    assert stopped_for(sub, caplog) == [("ERROR", "group.dropped group=g topic=t")]


def test_topics_that_go_elsewhere_than_the_settings_say_are_a_problem(settings):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    publish("t", 1)
    assert work(OLD) == [1]
    operations.prepare_move("t", NEW, **BY)
    assert "route" not in [one.kind for one in find_problems(get_overview(using=OLD))]
    (problem,) = [one for one in find_problems(get_overview(using=NEW)) if one.kind == "moves"]
    assert problem.text.startswith("g/t waits until it has settled all messages in the database that its topic leaves")
    settings.MYSQLQUEUE = AFTER
    operations.move_topic("t", NEW, **BY)
    assert "route" not in [one.kind for one in find_problems(get_overview(using=OLD))]
    settings.MYSQLQUEUE = BEFORE
    (problem,) = [one for one in find_problems(get_overview(using=OLD)) if one.kind == "route"]
    assert problem.text == (
        "Messages of the topic t go to the database 'queue' since it was moved, but MYSQLQUEUE['TOPICS'] names "
        "'default'. Correct the settings, or move the topic with queuemove."
    )
    assert (problem.severity, problem.topic) == (0, "t")


def test_a_group_that_only_the_old_database_has_is_not_dropped(settings, waits):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    operations.prepare_move("t", NEW, **BY)
    late = GroupRef("late", "t")
    register(OLD, {late: handler(group="late")})
    settings.MYSQLQUEUE = AFTER
    publish("t", 1, using=OLD)
    operations.pause("g", "t", using=OLD, **BY)
    with override_settings(MYSQLQUEUE=BEFORE):
        QueueMessage.objects.all().delete()
    operations.move_topic("t", NEW, **BY)  # It was registered there before the cut.
    assert groups.find(NEW, late) is not None


def test_a_group_that_was_registered_at_the_time_of_the_cut_is_not_dropped(settings, monkeypatch):
    prepare(settings)
    settings.MYSQLQUEUE = AFTER
    late = GroupRef("late", "t")
    cut = moving.cut

    def cut_late(move, **how):
        groups.register(OLD, late, mode="ordered", start="earliest")
        return cut(move)

    monkeypatch.setattr(moving, "cut", cut_late)
    sequence(OLD)
    QueueMessage.objects.all().delete()
    with pytest.raises(OperationRefused, match="was registered in the database 'default' after the move had begun"):
        operations.move_topic("t", NEW, **BY)
    assert groups.find(OLD, late) is not None


def test_it_says_for_what_it_waits(settings, monkeypatch):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    publish("t", 1)
    sequence(OLD)
    operations.pause("g", "t", **BY)
    operations.prepare_move("t", NEW, **BY)
    settings.MYSQLQUEUE = AFTER
    lines = []
    now = [0.0]

    def sleep(seconds):
        now[0] += 0.5
        if now[0] > 13:
            operations.resume("g", "t", using=OLD, **BY)
            work(OLD)

    monkeypatch.setattr(moving, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    operations.move_topic("t", NEW, **BY, report=lines.append)
    assert lines == 2 * [
        "The group g/t has 1 unsettled messages in default.",
        "g/t is paused in default: it does not move until it is resumed.",
        "No live subscribers for g/t in queue.",
    ]


def test_two_moves_at_once(settings, monkeypatch):
    """What an operator does to the group afterwards stays."""
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    operations.prepare_move("t", NEW, **BY)
    publish("t", 1)
    sequence(OLD)
    settings.MYSQLQUEUE = AFTER

    def sleep(seconds):
        work(OLD)
        operations.move_topic("t", NEW, **BY)
        operations.pause("g", "t", **BY)

    monkeypatch.setattr(moving, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    operations.move_topic("t", NEW, **BY)
    assert groups.find(NEW, REF).paused


def test_messages_that_were_scheduled_before_can_be_cancelled(settings):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    publish("t", 1, id="x", delay=600)
    operations.prepare_move("t", NEW, **BY)
    settings.MYSQLQUEUE = AFTER
    assert reschedule("x", topic="t", delay=700) == 1
    assert cancel("x", topic="t") == 1
    publish("t", 1, id="y", delay=600)
    settings.MYSQLQUEUE = BACK
    assert cancel("y", topic="t") == 1


def test_a_group_that_was_paused_stays_paused(settings):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    operations.pause("g", "t", **BY)
    operations.prepare_move("t", NEW, **BY)
    settings.MYSQLQUEUE = AFTER
    operations.move_topic("t", NEW, **BY)
    assert groups.find(NEW, REF).paused


def test_overrides_move_too(settings):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler(rate="5/s")})
    ConsumerGroup.objects.update(overrides={"rate": {"value": "1/s"}})
    operations.prepare_move("t", NEW, **BY)
    (there,), (here,) = ConsumerGroup.objects.using(NEW), ConsumerGroup.objects.using(OLD)
    assert (there.overrides, there.limits, there.mode) == (here.overrides, here.limits, here.mode)


def test_it_moves_back(settings, waits):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    operations.prepare_move("t", NEW, **BY)
    settings.MYSQLQUEUE = AFTER
    operations.move_topic("t", NEW, **BY)
    publish("t", 1)
    assert topics(OLD) == ["t@queue"]
    operations.prepare_move("t", OLD, **BY)
    assert groups.find(OLD, REF).paused
    settings.MYSQLQUEUE = BACK
    publish("t", 2)  # It still goes there.
    assert topics(OLD) == ["t@queue", "t@queue"]
    with pytest.raises(Waits):  # The relay has not passed the cut.
        operations.move_topic("t", OLD, **BY)
    publish("t", 3)
    with override_settings(MYSQLQUEUE=AFTER):
        publish("t", 4)
    assert topics(OLD) == ["t@queue", "t@queue", "t", "t"]
    assert relay(OLD, NEW).messages == 2
    sequence(NEW)
    QueueMessage.objects.using(NEW).all().delete()  # Everything is settled.
    operations.move_topic("t", OLD, **BY)
    assert not groups.find(OLD, REF).paused
    assert groups.find(NEW, REF) is None
    # What comes due or is redriven there later goes the same way.
    publish("t", 5, using=NEW)
    assert topics(NEW) == ["t@default"]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: operations.move_topic("t", NEW, **BY), "The topic 't' is not prepared to move to 'queue'"),
        (lambda: operations.prepare_move("t", OLD, **BY), "The topic 't' is in the database 'default' already"),
        (lambda: operations.prepare_move("t", "nowhere", **BY), "target 'nowhere': DATABASES has no such alias"),
        (lambda: operations.prepare_move("unknown", NEW, **BY), "There is no topic 'unknown'"),
        (lambda: operations.prepare_move("t_dlq", NEW, **BY), "names that end in '_dlq' are reserved"),
    ],
)
def test_what_is_refused(settings, call, error):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    with pytest.raises((OperationRefused, InvalidMessage), match=error):
        call()
    assert route_of(Session(OLD), "t") is None
    assert not ConsumerGroup.objects.using(NEW).exists()


def test_names_that_are_too_long_to_be_relayed_are_refused(settings, monkeypatch):
    monkeypatch.setattr(rules, "TOPIC_COLUMN_LENGTH", 6)
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    with pytest.raises(InvalidMessage, match="to be relayed, both names may have at most 5 characters together"):
        operations.prepare_move("t", NEW, **BY)
    assert route_of(Session(OLD), "t") is None


def test_settings_that_were_not_deployed_are_refused(settings):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    operations.prepare_move("t", NEW, **BY)
    with pytest.raises(OperationRefused, match="names the database 'default' for the topic 't', not 'queue'"):
        operations.move_topic("t", NEW, **BY)


# -- the command --------------------------------------------------------------


def test_the_command_shows_first_what_it_would_do(settings):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {REF: handler()})
    publish_many("t", range(3))
    sequence(OLD)
    text = command("queuemove", "t", "--to", NEW, "--prepare", "--dry-run")
    assert "will be prepared to move from the database default to queue" in text
    assert route_of(Session(OLD), "t") is None
    command("queuemove", "t", "--to", NEW, "--prepare", "--noinput")
    moves = [{"topic": "t", "from": OLD, "to": NEW, "state": "prepared"}]
    assert table(command("queuestatus", "--database", OLD), "Moves") == moves
    (group,) = table(command("queuestatus", "--database", NEW), "Groups")
    assert group["state"] == "moving, paused"
    command("queuemove", "t", "--to", NEW, "--cancel", "--noinput")
    assert "Moves" not in command("queuestatus", "--database", OLD)
    command("queuemove", "t", "--to", NEW, "--prepare", "--noinput")
    settings.MYSQLQUEUE = AFTER
    text = command("queuemove", "t", "--to", NEW, "--dry-run")
    assert "The group g/t has 3 unsettled messages in default." in text
    assert "No live subscribers for g/t in default: it does not move." in text
    assert "No live subscribers for g/t in queue." in text
    assert route_of(Session(OLD), "t") == Route("", OLD, NEW)
    QueueMessage.objects.all().delete()
    text = command("queuemove", "t", "--to", NEW, "--noinput")
    assert "The topic t has moved from the database default to queue." in text
    status = json.loads(command("queuestatus", "--database", OLD, "--format", "json"))
    assert status["moves"] == [{"topic": "t", "from": OLD, "to": NEW, "prepared": False}]
    with pytest.raises(CommandError, match=r"There is no topic 'p\.plain'"):
        command("queuemove", "p.plain", "--to", NEW, "--noinput")


# -- with traffic -------------------------------------------------------------


@pytest.fixture
def start(tmp_path):
    workers = []

    def start(settings, *arguments):
        worker = Worker(tmp_path, "--group", "plain", "--group", "atomic", *arguments, **settings)
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.end()


@pytest.mark.processes
@pytest.mark.promise("Moving a topic")
def test_nothing_is_lost_or_reordered_while_messages_are_published(start, settings, monkeypatch):
    """Subscribers are replaced one by one, publishers change their settings, and the move is interrupted."""
    settings.MYSQLQUEUE = BEFORE
    count, numbers, left = 0, [], threading.Event()

    def publish_all():
        while not left.is_set():
            publish("p.plain", {"n": len(numbers)}, key=f"k{len(numbers) % 5}")
            numbers.append(len(numbers))
            time.sleep(0.005)
        close_connections()

    old = [start(BEFORE), start(BEFORE)]
    for worker in old:
        wait_for(worker.is_ready, worker)
    publisher = threading.Thread(target=publish_all)
    publisher.start()
    try:
        time.sleep(0.5)
        command("queuemove", "p.plain", "--to", NEW, "--prepare", "--noinput")
        new = start(AFTER)
        wait_for(new.is_ready, new)
        settings.MYSQLQUEUE = AFTER  # From here on, the publisher uses the new settings.
        time.sleep(0.3)
        old[0].send(15)
        time.sleep(0.3)
        hand_over = moving.hand_over
        with monkeypatch.context() as patched:
            patched.setattr(moving, "hand_over", lambda *args, **options: (hand_over(*args, **options), 1 / 0))
            with pytest.raises(ZeroDivisionError):
                command("queuemove", "p.plain", "--to", NEW, "--noinput")
        old[1].send(15)
        newer = start(AFTER)
        command("queuemove", "p.plain", "--to", NEW, "--noinput")
        time.sleep(0.5)
        wait_for(lambda: QueueMessage.objects.using(NEW).filter(topic="p.plain").count() > 20, new)
    finally:
        left.set()
        publisher.join(20)
    count = len(numbers)
    wait_for(lambda: len(effects("plain")) >= count and len(effects("atomic")) >= count, new)
    for group in ("plain", "atomic"):
        assert Counter(number for _, _, number in effects(group)) == Counter(range(count))
        assert_ordered(effects(group))
    assert QueueMessage.objects.using(NEW).filter(topic="p.plain").count() > 20
    assert not ConsumerGroup.objects.filter(topic="p.plain").exists()
    assert newer.process.poll() is None


@pytest.mark.processes
@pytest.mark.promise("Moving a topic")
def test_dead_letters_and_scheduled_messages_follow(start, settings):
    settings.MYSQLQUEUE = BEFORE
    register(OLD, {GroupRef("plain", "p.plain"): handler("p.plain", "plain")})
    publish("p.plain", {"n": 1}, key="k")
    sub = Sub(handler("p.plain", "plain", function=lambda delivery: delivery.reject("no")))
    sub.settle()
    sub.leave()
    sequence(OLD)
    assert QueueMessage.objects.filter(topic="p.plain_dlq").count() == 1
    publish("p.plain", {"n": 2}, key="k", delay=6)
    operations.prepare_move("p.plain", NEW, **BY)
    settings.MYSQLQUEUE = AFTER
    operations.move_topic("p.plain", NEW, **BY)
    assert operations.redrive("p.plain", using=OLD, **BY).changed == 1
    worker = start(AFTER)
    wait_for(lambda: sorted(number for _, _, number in effects("plain")) == [1, 2], worker)
    redriven, scheduled = QueueMessage.objects.using(NEW).filter(topic="p.plain").order_by("offset")
    assert (redriven.target_group, scheduled.target_group) == ("plain", "")
