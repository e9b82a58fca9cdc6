"""The process's parts that the scenarios do not reach: sessions, heart, drain, overruns."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from django.db import DatabaseError, Error, OperationalError, connection, connections, transaction

from django_mysqlqueue import Message, publish, publish_many, subscriber
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.exceptions import CommitOutcomeUnknown, SubscriberError
from django_mysqlqueue.models import (
    ConsumerGroup,
    DeliveryState,
    OutboxMessage,
    PartitionLease,
    QueueMessage,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations import dropping, group_mode, pausing
from django_mysqlqueue.runtime import inline, sessions
from django_mysqlqueue.runtime.handling.executor import Executor
from django_mysqlqueue.runtime.polling.context import Limits, Progress
from django_mysqlqueue.runtime.process.heartbeat import Heart
from django_mysqlqueue.runtime.process.subscriber import Subscriber
from django_mysqlqueue.service import heartbeats, scheduling, settling
from django_mysqlqueue.service.deliveries import Action
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql import session as transactions
from django_mysqlqueue.sql.connection import drop_connection
from django_mysqlqueue.sql.session import Retry
from django_mysqlqueue.testing import deliver_all
from tests.support.harness import USING, Going, Sub, handler, in_thread, lag

REF = GroupRef("g", "t")


def heart(progress=None, **options):
    defaults = {"interval": 0.05, "lease": 0.5, "info": {"host": "tests"}, "progress": progress or Going()}
    return Heart(USING, "s:1", [REF], **{**defaults, **options})


def test_the_heart_beats_until_it_is_stopped(db):
    beating = heart()
    beating.start()
    assert beating.beaten.wait(5)
    assert beating.good()
    beating.stop()
    row = SubscriberHeartbeat.objects.get()
    assert (row.consumer_group, row.topic, row.info) == ("g", "t", {"host": "tests"})


def test_the_heart_withholds_beats_of_a_stuck_poller(db):
    progress = Progress()
    progress.at -= 1
    beating = heart(progress)
    assert beating._beat() is False
    assert not SubscriberHeartbeat.objects.exists()


def test_leases_are_in_doubt_after_a_late_beat_until_they_are_verified(db):
    beating = heart()
    assert beating._beat()
    assert beating.good()
    beating.beat_at -= 10  # the last beat is long ago, by this process's own clock
    assert not beating.good()
    assert not beating.must_verify()  # not before it beats again
    assert beating._beat()
    assert not beating.good()
    assert beating.must_verify()
    beating.verified()
    assert beating.good()


def test_a_failed_beat_is_no_beat(db, monkeypatch):
    def fail(*args):
        raise OperationalError(2006, "gone")

    beating = heart()
    monkeypatch.setattr(heartbeats, "beat", fail)
    assert in_thread(beating._beat) is False
    assert not beating.beaten.is_set()


@pytest.mark.servers_only
def test_a_transaction_of_a_subscribers_thread_begins_in_one_statement(db):
    """Rolled back and committed as any other, and nested as any other."""

    @transaction.atomic
    def fail(number):
        publish("t", number)
        raise ZeroDivisionError

    def work():
        sessions.adopt(USING, sessions.Timeouts(idle=60, lock_wait=5, network=5, read=60))
        mine = connections[USING]
        mine.ensure_connection()

        def questions():
            with mine.cursor() as cursor:
                cursor.execute("SHOW SESSION STATUS LIKE 'Com_%'")
                return {
                    name: int(count) for name, count in cursor.fetchall() if name in ("Com_begin", "Com_set_option")
                }

        before = questions()
        with pytest.raises(ZeroDivisionError):
            fail(1)
        with transaction.atomic():
            publish("t", 2)
            assert not mine.get_autocommit()
            with pytest.raises(ZeroDivisionError):
                fail(3)
        assert mine.get_autocommit()
        publish("t", 4)
        after = questions()
        mine.connection.close()
        drop_connection(mine)
        return {name: after[name] - before[name] for name in after}

    assert in_thread(work) == {"Com_begin": 2, "Com_set_option": 0}
    assert sorted(OutboxMessage.objects.values_list("payload", flat=True)) == [b"2", b"4"]


@pytest.mark.servers_only
def test_sessions_have_the_time_outs_of_their_thread(db):
    def read():
        sessions.adopt(USING, sessions.Timeouts(idle=7, lock_wait=3, network=5, read=9))
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@wait_timeout, @@innodb_lock_wait_timeout, @@net_read_timeout, @@net_write_timeout")
            return cursor.fetchone()

    assert in_thread(read) == (7, 3, 5, 5)
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@wait_timeout")
        assert cursor.fetchone()[0] > 7  # other threads keep the server's


@pytest.mark.servers_only
def test_an_idle_connection_that_the_server_ended_is_replaced(db):
    def check():
        sessions.adopt(USING, sessions.Timeouts(idle=1, lock_wait=1, network=1, read=5))
        connection.ensure_connection()
        with connection.cursor() as cursor:
            cursor.execute("SELECT CONNECTION_ID()")
            identity = cursor.fetchone()[0]
        in_thread(lambda: kill(identity))
        sessions.refresh(idle=True)
        with connection.cursor() as cursor:
            cursor.execute("SELECT CONNECTION_ID()")
            return identity, cursor.fetchone()[0]

    def kill(identity):
        with connection.cursor() as cursor:
            cursor.execute(f"KILL CONNECTION {identity}")

    before, after = in_thread(check)
    assert before != after


def test_a_thread_starts_while_the_server_is_away(db, monkeypatch):
    """Taking its time-outs asks the server nothing: a heart or a handler thread that died of it never came back."""

    def start():
        wrapper = connections[USING]
        monkeypatch.setattr(type(wrapper), "get_new_connection", away)
        sessions.adopt(USING, sessions.Timeouts(idle=7, lock_wait=3, network=5, read=9))
        monkeypatch.undo()
        return {name: value for name, value in wrapper.settings_dict["OPTIONS"].items() if "timeout" in name}

    def away(self, parameters):
        raise OperationalError(2002, "nobody is there")

    options = in_thread(start)
    if connection.vendor == "mysql":
        assert options == {"connect_timeout": 10, "read_timeout": 9, "write_timeout": 9}


def test_a_handler_that_failed_on_its_connection_gets_another(db):
    """A demoted primary answers a ping, and refuses the next message's writes as well."""

    def check():
        connection.ensure_connection()
        failed = connection.connection
        with pytest.raises(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT nothing FROM nowhere")
        assert connection.is_usable()
        sessions.tidy()
        assert connection.connection is not failed

    in_thread(check)


def test_a_connection_that_a_handler_closed_below_django_is_dropped(db):
    def check():
        connection.ensure_connection()
        connection.connection.close()
        drop_connection(connection)
        assert connection.connection is None

    in_thread(check)


@pytest.mark.servers_only
@pytest.mark.parametrize("code", [1290, 1792, 1836])
def test_a_connection_to_a_demoted_primary_is_not_sound(db, code):
    connection.ensure_connection()
    unknown = CommitOutcomeUnknown("COMMIT failed")
    unknown.__cause__ = OperationalError(code, "text")
    before = connection.connection
    assert not sessions.is_sound(connection, OperationalError(code, "text"), before=before)
    assert not sessions.is_sound(connection, unknown, before=before)


@pytest.mark.parametrize("error", [OperationalError(1213, "deadlock"), OperationalError(1205, ""), Retry(), Error()])
def test_errors_that_say_nothing_of_the_server(db, error):
    connection.ensure_connection()
    assert sessions.is_sound(connection, error, before=connection.connection)


def cut_inside_a_transaction():
    """The server ends this thread's connection between two statements; Django opens another one before it says so."""

    def operation(session):
        ((own,),) = session.rows("SELECT CONNECTION_ID()")
        in_thread(lambda: transactions.Session(USING).execute(f"KILL CONNECTION {own}"))
        session.row("SELECT 1")

    transactions.run(USING, operation)


@pytest.mark.servers_only
def test_a_connection_cut_inside_a_groups_turn_starts_everything_anew(db):
    """It is no trouble of the group's own: what the other groups remember is of the server that is gone."""
    sub = Sub(handler())
    sub.step()
    (work,) = sub.poller.groups
    work.turn = cut_inside_a_transaction
    with pytest.raises(OperationalError):
        sub.poller._turn(work)
    assert work.failures.count == 0
    assert connection.is_usable()


@pytest.mark.servers_only
def test_a_connection_cut_inside_a_beat_makes_the_others_leave(db, monkeypatch):
    monkeypatch.setattr(sessions, "_distrusted", {})
    beating = heart()

    def check():
        assert beating._beat()
        with monkeypatch.context() as patch:
            patch.setattr(heartbeats, "beat", lambda *args: cut_inside_a_transaction())
            assert not beating._beat()
        assert not sessions._distrusted
        assert beating._beat()
        assert list(sessions._distrusted) == [USING]

    in_thread(check)


@pytest.mark.servers_only
def test_after_an_outage_every_thread_leaves_the_old_server(db, monkeypatch):
    """The heart tells the others once its beats are taken again: by then the name leads to the new primary."""
    monkeypatch.setattr(sessions, "_distrusted", {})
    beating = heart()

    def beat(error):
        with monkeypatch.context() as patch:
            if error is not None:
                patch.setattr(heartbeats, "beat", lambda *args: raise_it(error))
            return beating._beat()

    def raise_it(error):
        raise error

    def check():
        sessions.adopt(USING, sessions.Timeouts(idle=60, lock_wait=5, network=5, read=60))
        connection.ensure_connection()
        kept = []
        for error in (None, OperationalError(1213, "deadlock"), OperationalError(1290, "read-only"), None, None):
            in_thread(lambda error=error: beat(error))
            kept.append(not sessions.renew())
            connection.ensure_connection()
        return kept

    assert in_thread(check) == [True, True, True, False, True]


def test_tidy_keeps_a_sound_connection_and_drops_an_open_transaction(db):
    def check():
        connection.ensure_connection()
        sound = connection.connection
        sessions.tidy()
        assert connection.connection is sound
        connection.set_autocommit(False)
        publish("t", 1)
        sessions.tidy()
        assert connection.connection is None

    in_thread(check)
    assert not QueueMessage.objects.exists()
    assert lag() == 0


def test_an_overrun_is_found(db):
    publish("t", 1)
    sub = Sub(handler(max_processing_time=5.0))
    sub.step()
    held = sub.take()
    assert sub.inbox.overrun() is None
    held.started_at -= 6
    assert sub.inbox.overrun() is held


def test_no_handler_to_run_is_an_error():
    with pytest.raises(SubscriberError, match="no handler"):
        Subscriber(USING, {}, get_settings())


def test_a_database_error_starts_everything_anew(db, monkeypatch):
    """The poller loses its connection and memory; nothing is lost or handled twice."""
    got = []
    publish_many("t", (Message(number, key="k") for number in range(10)))
    sub = Sub(handler(function=lambda delivery: got.append((delivery.payload, delivery.attempt))), batch_size=4)
    sub.step()
    sub.work(2)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def fail():
        raise OperationalError(2013, "Lost connection")

    assert sub.poller.guarded(fail) is False
    assert sub.poller.guarded(sub.settle) is True
    assert got == [(number, 1) for number in range(10)]
    assert lag() == 0


def test_an_error_while_reading_payloads_gives_the_deliveries_back(db, monkeypatch):
    """Claimed and committed, but the connection broke before the payloads came: order is kept."""
    from django_mysqlqueue.service import payloads

    got = []
    publish_many("t", (Message(number, key="k") for number in range(10)))
    sub = Sub(handler(function=lambda delivery: got.append((delivery.payload, delivery.attempt))), batch_size=4)
    real = payloads.read

    def fail_once(using, offsets):
        monkeypatch.setattr(payloads, "read", real)
        raise OperationalError(2013, "Lost connection")

    monkeypatch.setattr(payloads, "read", fail_once)
    sub.step()
    assert payloads.read is real  # it has failed
    sub.poller.ordered[0].rests_until = 0.0
    sub.settle()
    assert got == [(number, 1) for number in range(10)]


def test_a_message_that_is_gone_by_then_is_settled(db):
    publish_many("t", (Message(number, key="k") for number in range(3)))
    got = []
    sub = Sub(handler(function=lambda delivery: got.append(delivery.payload)), batch_size=1, prefetch=1)
    sub.step()
    first = sub.take()
    sub.inbox.put([])  # nothing else
    QueueMessage.objects.filter(payload=b"1").delete()
    sub.run(first)
    sub.settle()
    assert got == [0, 2]
    assert lag() == 0


def test_a_slow_group_does_not_starve_another(db):
    """Its share of the inbox is full; the other group's messages flow."""
    publish_many("t", (Message(number, key=f"k{number % 50}") for number in range(200)))
    got = []
    slow = handler(group="slow")
    fast = handler(group="fast", function=lambda delivery: got.append(delivery.payload))
    sub = Sub(slow, fast, prefetch=20, batch_size=10)
    held = []
    for _ in range(200):
        sub.step(tick=False)
        while (one := sub.take()) is not None:
            if one.claimed.ref.group == "slow":
                held.append(one)  # never finishes
            else:
                sub.run(one)
        sub.flush()
    assert sorted(got) == list(range(200))
    assert len(held) <= 50  # one a partition


def test_a_hot_partition_does_not_starve_the_others(db):
    publish_many("t", (Message(number, key="hot") for number in range(2000)))
    publish_many("t", (Message(number, key=f"cold{number}") for number in range(20)))
    sub = Sub(handler(), batch_size=20, prefetch=40)
    handled = []
    sub.handlers[REF] = sub.handlers[REF]
    for _ in range(8):
        sub.step()
        while (one := sub.take()) is not None:
            handled.append(one.claimed.key)
            sub.run(one)
        sub.flush()
    assert {f"cold{number}" for number in range(20)} <= set(handled)
    assert handled.count("hot") < 500


def test_claims_are_bounded_in_bytes(db):
    publish_many("t", (Message(b"x" * 30_000, key="k") for _ in range(20)))
    publish("t", b"y" * 200_000, key="big")  # above the bound alone: it comes all the same
    sub = Sub(handler(), limits=Limits(waiting_bytes=100_000))
    most = 0
    for _ in range(60):
        sub.step()
        most = max(most, sub.inbox.waiting(REF)[1])
        sub.work()
        sub.flush()
    assert most <= 300_000
    assert lag() == 0


def test_idle_groups_leave_their_part_of_prefetch_to_a_busy_one(db):
    """And have it back as soon as they have something to do: at most twice PREFETCH waits."""
    publish_many("t", (Message(number, key=f"k{number % 20}") for number in range(500)))
    sub = Sub(handler(), *(handler(topic=f"u{number}") for number in range(4)), prefetch=100, batch_size=50)
    sub.step(times=3)
    busy = sub.inbox.waiting(REF)[0]
    assert 75 <= busy <= 100  # a fixed part would be 20
    for number in range(4):
        publish_many(f"u{number}", (Message(n, key=f"k{n}") for n in range(50)))
    sub.step(times=3)
    counts = {ref.topic: count for ref, (count, _) in sub.inbox.waiting_counts().items()}
    assert counts == {"t": busy, "u0": 20, "u1": 20, "u2": 20, "u3": 20}
    assert sub.settle(rounds=100) == 700


def test_the_heart_outlives_a_bug(db, monkeypatch, caplog):
    """Its thread gone, nothing would start any more, and the process would stay."""
    broken = {"times": 2}
    beat = heartbeats.beat

    def fails_twice(*args):
        if broken["times"]:
            broken["times"] -= 1
            raise TypeError("a bug")
        beat(*args)

    monkeypatch.setattr(heartbeats, "beat", fails_twice)
    beating = heart()
    beating.start()
    assert beating.beaten.wait(5)
    beating.stop()
    assert "TypeError: a bug" in caplog.text


def test_a_stale_delivery_that_a_handler_notices_is_no_attempt_of_the_new_holder(db, caplog):
    def work(delivery):
        DeliveryState.objects.update(delivery_token=12345)  # handed out again
        delivery.extend(5)

    publish("t", 1)
    sub = Sub(handler(function=work))
    sub.step()
    sub.work()
    sub.flush()
    assert "delivery.lost" in caplog.text
    row = DeliveryState.objects.get()
    assert (row.delivery_token, row.retry_count) == (12345, 0)


def test_a_suspect_whose_start_cannot_be_put_on_record_is_given_back(db, clock, monkeypatch, caplog):
    publish("t", 1)
    lost = Sub(handler())
    lost.step()
    lost.take()
    clock.advance(31)
    got = []
    sub = Sub(handler(function=lambda delivery: got.append(delivery.attempt)))
    sub.step()

    def fails(*args):
        raise OperationalError(2013, "Lost connection")

    with monkeypatch.context() as patch:
        patch.setattr(settling, "record_start", fails)
        sub.work()
        sub.flush()
    assert "delivery.not_started" in caplog.text
    assert got == []
    assert DeliveryState.objects.get().retry_count == 0
    sub.settle()
    assert got == [1]
    assert lag() == 0


def test_moving_time_waits_for_the_sequencer(db, monkeypatch):
    """For tests beside a real subscriber: a scheduled row that is being sequenced is not moved."""
    publish("t", 1, delay=3600)
    tries = iter([False, True])
    monkeypatch.setattr(scheduling, "take_mutex", lambda session: next(tries))
    scheduling.advance(USING, 3_600_001)
    assert Sub(handler()).settle() == 1


def test_an_outage_makes_few_lines_and_one_at_its_end(db, monkeypatch, caplog):
    caplog.set_level("INFO")
    beat = heartbeats.beat

    def fails(*args):
        raise OperationalError(2002, "Can't connect")

    beating = heart()
    monkeypatch.setattr(heartbeats, "beat", fails)
    for _ in range(20):
        assert not beating._beat()
    monkeypatch.setattr(heartbeats, "beat", beat)
    assert beating._beat()
    assert caplog.text.count("heart.failed") == 5  # the 1st, 2nd, 4th, 8th and 16th
    assert "heart.recovered failures=20" in caplog.text
    sub = Sub(handler())
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for _ in range(20):
        assert not sub.poller.guarded(lambda: fails())
    assert sub.poller.guarded(lambda: None)
    assert caplog.text.count("poller.failed") == 5
    assert "poller.recovered failures=20" in caplog.text


def test_a_poller_that_hangs_ends_its_process(db, monkeypatch):
    process = Subscriber(USING, {REF: handler()}, get_settings())
    monkeypatch.setattr("django_mysqlqueue.runtime.process.subscriber.STUCK_LIMIT", 1.0)
    assert not any(process._is_stuck() for _ in range(5))
    process.progress.at += 1  # it goes round
    assert not any(process._is_stuck() for _ in range(5))
    assert process._is_stuck()


def test_a_poller_that_hangs_is_shown(db, monkeypatch, caplog):
    process, hangs = Subscriber(USING, {REF: handler()}, get_settings()), threading.Event()

    def step_that_hangs():
        hangs.wait(30)

    monkeypatch.setattr("django_mysqlqueue.runtime.process.subscriber.STUCK_LIMIT", 1.0)
    monkeypatch.setattr(process.poller, "step", step_that_hangs)
    assert process.run() == 1
    hangs.set()
    process.stop()
    assert process._finished.wait(30)
    (record,) = [one for one in caplog.records if getattr(one, "mysqlqueue", {}).get("event") == "poller.stuck"]
    first, *others = record.stack_info.split("\nThread ")
    assert first.startswith("Thread mysqlqueue-poller:\n")
    assert "in step_that_hangs\n    hangs.wait(30)" in first
    assert any(text.startswith("MainThread:") for text in others)
    # Beside the line, not in it: what reads lines reads on.
    assert "\n" not in record.getMessage()
    assert record.mysqlqueue == {"event": "poller.stuck", "name": process.name, "seconds": 1.0}
    assert logging.Formatter("%(message)s").format(record).endswith(record.stack_info)


@pytest.mark.parametrize("mode", ["ordered", "shared"])
@pytest.mark.parametrize("end", ["paused", "dropped"])
def test_a_drain_ends_beside_a_group_that_claims_nothing(db, mode, end):
    """Its partitions have work and no owner: nobody will take them, so they are nothing to wait for."""
    one = handler(mode=mode)
    draining = Subscriber(USING, {one.ref: one}, get_settings(), drain=True)
    sub = Sub(one)
    draining.poller, draining.inbox = sub.poller, sub.inbox
    publish("t", 1)
    if end == "paused":
        pausing.pause(USING, one.ref, actor="ada")
    else:
        dropping.drop(USING, one.ref, actor="ada")
    sub.step(times=3)
    assert sub.work() == 0
    assert draining._is_drained()


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_group_whose_mode_is_changed_ends_the_process(db, caplog, mode):
    """As it would not have started; its other groups are for one that is started with the right code."""
    publish("t", 1)
    one = handler(mode=mode)
    process = Subscriber(USING, {one.ref: one}, get_settings())

    def change():
        # It has registered, and is not seen yet.
        other = "shared" if mode == "ordered" else "ordered"
        in_thread(lambda: group_mode.set_mode(USING, one.ref, other, lease_ms=30_000))

    with caplog.at_level(logging.INFO, logger="django_mysqlqueue"):
        assert in_thread(lambda: process.run(ready=change)) == 1
    (record,) = [one for one in caplog.records if getattr(one, "mysqlqueue", {}).get("event") == "group.other_mode"]
    assert record.levelno == logging.CRITICAL
    assert f"queuegroupmode g t {mode}" in record.getMessage()
    assert lag() == 1
    assert not PartitionLease.objects.exists()


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_delivering_inline_refuses_a_group_of_another_mode(db, no_handlers, monkeypatch, mode):
    subscriber("t", group="g", mode=mode)(lambda delivery: None)
    other = "shared" if mode == "ordered" else "ordered"
    publish("t", 1)
    with monkeypatch.context() as patch:
        register = inline.register

        def change_behind(*args):
            register(*args)
            group_mode.set_mode(USING, REF, other, lease_ms=30_000)

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


def test_a_handler_thread_leaves_a_connection_that_is_distrusted(db):
    """Also one whose handlers only read: the old primary answers them for ever."""
    seen = []
    publish_many("t", [Message(n, key="k") for n in range(3)])
    sub = Sub(handler(function=lambda delivery: seen.append(connection.connection)))
    sub.step()

    def work():
        sessions.adopt(USING, sessions.Timeouts(idle=60, lock_wait=5, network=5, read=60))
        executor = Executor(sub.inbox, USING, threads=0, timeouts=None)
        for number in range(3):
            connection.ensure_connection()
            if number == 2:
                sessions.distrust(USING)
            batch = sub.inbox.take(None, wait=False)
            sub.inbox.finish(batch, executor._safely(batch))
            sub.inbox.leave(batch)

    in_thread(work)
    assert seen[0] is seen[1]
    assert seen[2] is not seen[1], "a connection of before the fail-over is not used again"


@pytest.mark.parametrize("where", ["renew", "tidy"])
def test_trouble_with_connections_costs_no_delivery_its_outcome(db, monkeypatch, where):
    publish("t", 1)
    sub = Sub(handler())
    sub.step()
    held = sub.take()
    monkeypatch.setattr(sessions, where, lambda: 1 / 0)
    (outcome,) = Executor(sub.inbox, USING, threads=0, timeouts=None)._safely(sub._batches[id(held)])
    assert outcome.action is Action.ACK


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
