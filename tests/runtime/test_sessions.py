"""Connections of a subscriber's threads: how they are set, and when they are replaced."""

from __future__ import annotations

import pytest
from django.db import DatabaseError, Error, OperationalError, connection, connections, transaction

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, in_thread, lag
from tests.support.heartbeats import heart
from tests.support.internals import Action, Executor, Retry, close_connections, drop_connection, heartbeats, sessions
from tests.support.internals import session as transactions


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

    assert in_thread(work) == {"Com_begin": 1, "Com_set_option": 0}, "what failed before it was sent was not begun"
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
    assert work.health.failures.count == 0
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


@pytest.mark.any_engine
def test_a_connection_that_no_handler_has_used_is_left_alone(monkeypatch):
    dropped = []
    monkeypatch.setattr(sessions, "drop_connection", lambda one: dropped.append(one.alias))

    def work():
        sessions.adopt(USING, sessions.Timeouts(idle=60, lock_wait=5, network=5, read=60), watch=True)
        assert connections[USING].connection is None
        sessions.tidy()

    in_thread(work)
    assert dropped == []


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


def test_a_subscriber_works_where_the_project_has_autocommit_off(db):
    from django_mysqlqueue.runtime import sessions
    from tests.support.harness import in_thread

    def work():
        connection.settings_dict = {**connection.settings_dict, "AUTOCOMMIT": False}
        sessions.adopt(USING, sessions.Timeouts(idle=30, lock_wait=5, network=5, read=20))
        got = Recorder()
        Sub(handler(function=got)).settle()
        close_connections()
        return got.payloads

    publish("t", 1)
    assert in_thread(work) == [1]
    assert not OutboxMessage.objects.exists()
    assert lag() == 0
