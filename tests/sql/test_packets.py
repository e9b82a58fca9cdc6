"""Several statements in one packet, on the connections of a subscriber's threads."""

from __future__ import annotations

import contextlib

import pytest
from django.db import IntegrityError, OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import publish
from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.models import DeliveryState, JobResult
from tests.app import jobs
from tests.app.models import Effect
from tests.support import job_worlds
from tests.support.harness import USING, Sub, handler, in_thread, lag
from tests.support.internals import (
    Retry,
    Session,
    drop_connection,
    packets_of,
    registry,
    run,
    sequencing,
    sessions,
    together,
)
from tests.support.publishing import rolled_back

pytestmark = pytest.mark.servers_only
TABLE = Effect._meta.db_table
INSERT = f"INSERT INTO {TABLE} (name, value) VALUES (%s, %s)"
TIMEOUTS = sessions.Timeouts(idle=60, lock_wait=2, network=5, read=60)


def in_subscriber(function):
    """Run a function in a thread with a connection as that of a poller."""

    def work():
        sessions.adopt(USING, TIMEOUTS)
        connections[USING].ensure_connection()
        return function()

    return in_thread(work)


@contextlib.contextmanager
def sent():
    """The packets that are sent meanwhile."""
    found = []
    with CaptureQueriesContext(connections[USING]) as queries:
        yield found
    found += [query["sql"] for query in queries]


def names():
    return sorted(Effect.objects.values_list("name", flat=True))


def test_what_waits_is_sent_with_the_next_statement_and_with_the_commit(db):
    def operation(session):
        session.later(INSERT, ("a", 1))
        count = session.ask(f"SELECT COUNT(*) FROM {TABLE} WHERE name <> %s", ("50%",))
        first = session.ask(f"SELECT name FROM {TABLE} WHERE name LIKE 'a%%'")
        found = count(), first()
        session.later(INSERT, ("b%", 2))
        session.later(f"UPDATE {TABLE} SET value = 3 WHERE name = %s", ("a",), rows=1)
        return found

    def work():
        with sent() as packets:
            found = run(USING, operation)
        return found, packets

    found, packets = in_subscriber(work)
    assert found == ([(1,)], [("a",)])
    assert [packet.count("; ") for packet in packets] == [3, 3]
    assert packets[0].startswith("START TRANSACTION; INSERT")
    assert packets[1].endswith("; COMMIT")
    assert names() == ["a", "b%"]


def test_a_transaction_without_statements_sends_nothing(db):
    def work():
        with sent() as packets:
            with transaction.atomic(USING):
                pass
            with rolled_back():
                pass
        return packets

    assert in_subscriber(work) == []


@pytest.mark.parametrize("ends", ["commit", "statement", "answer"])
def test_a_row_that_is_not_there_fails_the_transaction(db, ends):
    """Before the COMMIT behind it is executed: nothing is committed, and everything is tried again."""
    tries = []

    def operation(session):
        tries.append(1)
        session.later(INSERT, (f"try {len(tries)}", 1))
        name = "a" if len(tries) == 1 else f"try {len(tries)}"
        if ends == "answer":
            answer = session.ask("SELECT 1")
        session.later(f"UPDATE {TABLE} SET value = 3 WHERE name = %s", (name,), rows=1)
        if ends == "statement":
            session.row("SELECT 1")
        if ends == "answer":
            answer()

    def work():
        run(USING, operation)
        with pytest.raises(Retry):
            run(USING, lambda session: session.later(f"DELETE FROM {TABLE} WHERE name = 'z'", rows=1), attempts=1)
        assert connections[USING].get_autocommit()
        assert not connections[USING].in_atomic_block

    in_subscriber(work)
    assert names() == ["try 2"]


def test_an_error_before_the_commit_is_no_unknown_outcome(db):
    def operation(session):
        session.later(INSERT, ("a", 1))
        session.later(f"INSERT INTO {TABLE} (id, name, value) SELECT MAX(id), 'b', 1 FROM {TABLE}")
        session.later(INSERT, ("c", 1))

    def work():
        with pytest.raises(IntegrityError):
            run(USING, operation)
        run(USING, lambda session: session.later(INSERT, ("d", 1)))

    in_subscriber(work)
    assert names() == ["d"]


def test_a_connection_that_is_killed_before_the_commit(db):
    def operation(session):
        session.later(INSERT, ("a", 1))
        session.later("KILL CONNECTION_ID()")

    def work():
        with pytest.raises((CommitOutcomeUnknown, OperationalError)):
            run(USING, operation)

    in_subscriber(work)
    assert names() == []


def test_what_waited_on_a_lost_connection_is_not_sent_on_the_next_one(db):
    def work():
        with contextlib.suppress(OperationalError), transaction.atomic(USING):
            session = Session(USING)
            session.row("SELECT 1")
            session.later(INSERT, ("a", 1))
            drop_connection(connections[USING])
        session = Session(USING)
        assert session.row("SELECT 2") == (2,)
        with transaction.atomic(USING):
            session.later(INSERT, ("b", 1))

    in_subscriber(work)
    assert names() == ["b"]


def test_savepoints_and_hooks(db):
    done = []

    def work():
        session = Session(USING)
        with transaction.atomic(USING):
            session.later(INSERT, ("a", 1))
            with rolled_back():
                session.later(INSERT, ("b", 1))
            with pytest.raises(IntegrityError), transaction.atomic(USING):
                session.later(f"INSERT INTO {TABLE} (id, name, value) SELECT MAX(id), 'c', 1 FROM {TABLE}")
            with transaction.atomic(USING):
                session.later(INSERT, ("d", 1))
            transaction.on_commit(lambda: done.append(names()), using=USING)
            assert done == []

    in_subscriber(work)
    assert done == [["a", "d"]]


def test_long_statements_are_sent_in_several_packets(db):
    def work():
        with sent() as packets:
            run(USING, lambda session: [session.later(INSERT, (f"{number:0100}", 1)) for number in range(1200)])
        return len(packets)

    assert in_subscriber(work) == 2
    assert len(names()) == 1200


def test_a_connection_that_takes_one_statement_only(db, monkeypatch):
    """As behind a proxy that decides by the first one: it is found out once, when the connection is opened."""
    options = {**connections[USING].settings_dict["OPTIONS"], "multi_statements": False}

    def operation(session):
        session.later(INSERT, ("a", 1))
        assert session.ask(f"SELECT name FROM {TABLE}")() == [("a",)]
        session.later(f"UPDATE {TABLE} SET value = 3 WHERE name = %s", ("a",), rows=1)

    def work():
        sessions.adopt(USING, TIMEOUTS)
        connections[USING].settings_dict = {**connections[USING].settings_dict, "OPTIONS": options}
        with sent() as packets:
            run(USING, operation)
        assert not packets_of(connections[USING]).is_usable
        with pytest.raises(Retry):
            run(USING, lambda session: session.later(f"DELETE FROM {TABLE} WHERE name = 'z'", rows=1), attempts=1)
        return packets

    packets = in_thread(work)
    assert not any("; " in packet for packet in packets)
    assert names() == ["a"]


def test_a_server_that_refuses_several_statements_is_noticed(db, monkeypatch):
    """The settings say nothing of it."""

    def work():
        sessions.adopt(USING, TIMEOUTS)
        connect = connections[USING].get_new_connection
        one_only = {"multi_statements": False}
        monkeypatch.setattr(connections[USING], "get_new_connection", lambda given: connect({**given, **one_only}))
        run(USING, lambda session: session.later(INSERT, ("a", 1)))
        return packets_of(connections[USING]).is_usable

    assert in_thread(work) is False
    assert names() == ["a"]


def test_a_session_that_rests_has_its_limit_again_in_a_transaction(db):
    def limit():
        return Session(USING).row("SELECT @@wait_timeout")[0]

    def work():
        drop_connection(connections[USING])
        sessions.rest(USING)
        assert sessions.rests(USING)
        resting = limit()
        with transaction.atomic(USING):
            inside = limit()
        assert not sessions.rests(USING)
        return resting, inside, limit()

    assert in_subscriber(work) == (sessions.REST, 60, 60)


@pytest.mark.promise("Delivery")
def test_a_subscriber_sends_half_as_many_packets(db):
    """What is sequenced, claimed and acked in the same way."""

    def work(topic):
        sub = Sub(handler(topic=topic))
        sub.settle()
        publish(topic, 1, key="k")
        with sent() as packets:
            sequencing.sequence(USING)
            sub.step(tick=False)
            sub.work()
            sub.step(tick=False)
        assert lag(topic=topic) == 0
        return packets

    publish("t", 0, key="k")
    publish("u", 0, key="k")
    together, alone = in_subscriber(lambda: work("t")), in_thread(lambda: work("u"))
    assert len(together) < len(alone) * 0.6


def test_execute_wrappers_see_all_that_an_enqueue_sends(db):
    """Those of the project, as for tracing."""
    seen = []

    def trace(execute, sql, params, many, context):
        seen.append(sql)
        return execute(sql, params, many, context)

    connection = connections[USING]
    with connection.execute_wrapper(trace), together(connection), transaction.atomic():
        Session(USING).later(INSERT, ("a", 1))
        Session(USING).later(INSERT, ("b", 1))
    assert [one.count("INSERT") for one in seen] == [2]
    assert seen[0].endswith("; COMMIT")
    assert connection.execute_wrappers == []
    assert names() == ["a", "b"]


def test_errors_have_the_class_that_django_gives_them(db):
    """Wherever in a packet the statement is."""

    def operation(session):
        session.later(INSERT, ("a", 1))
        session.later("SELECT ~0 + 1")  # 1690

    def work():
        with pytest.raises(IntegrityError):
            run(USING, operation)

    in_subscriber(work)
    assert names() == []


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_error_that_is_not_the_databases_rolls_back(db, where):
    """Of a wrapper of the project, for example one that limits the number of queries."""

    class Limit(Exception):
        pass

    def refuse(execute, sql, params, many, context):
        if where == "before" and "COMMIT" in sql:
            raise Limit
        execute(sql, params, many, context)
        if where == "after" and "INSERT" in sql:
            raise Limit

    def operation(session):
        session.row("SELECT 1")
        session.later(INSERT, ("a", 1))
        if where == "after":
            session.row("SELECT 1")

    def work():
        own = connections[USING]
        with pytest.raises(Limit), own.execute_wrapper(refuse):
            run(USING, operation)
        run(USING, lambda session: session.later(INSERT, ("b", 1)))

    in_subscriber(work)
    assert names() == ["b"]


@pytest.mark.parametrize("ends", ["commit", "answer"])
def test_a_wrapper_that_adds_a_comment(db, ends):
    """As those that tell databases which view has sent a statement."""

    def comment(execute, sql, params, many, context):
        return execute(f"{sql} /* view */", params, many, context)

    def operation(session):
        session.later(INSERT, ("a", 1))
        if ends == "answer":
            assert session.ask(f"SELECT name FROM {TABLE}")() == [("a",)]
        session.later(f"UPDATE {TABLE} SET value = 3 WHERE name = 'a'", rows=2 if ends == "commit" else 1)

    def work():
        with connections[USING].execute_wrapper(comment):
            run(USING, operation, attempts=1)

    if ends == "commit":
        with pytest.raises(Retry):
            in_subscriber(work)
    else:
        in_subscriber(work)
    assert names() == ["a"] * (ends == "answer")


def test_a_wrapper_that_sends_something_else_is_no_success(db):
    def replace(execute, sql, params, many, context):
        return execute("SELECT 1", (), many, context) if "INSERT" in sql else execute(sql, params, many, context)

    def work():
        with connections[USING].execute_wrapper(replace), pytest.raises((CommitOutcomeUnknown, OperationalError)):
            run(USING, lambda session: session.later(INSERT, ("a", 1)), attempts=1)
        run(USING, lambda session: session.later(INSERT, ("b", 1)))

    in_subscriber(work)
    assert names() == ["b"]


def test_a_wrapper_that_asks_something_itself_takes_no_answer(db):
    def explain(execute, sql, params, many, context):
        with connections[USING].cursor() as cursor:
            cursor.execute("SELECT 7")
            assert cursor.fetchall() == ((7,),)
        return execute(sql, params, many, context)

    def work():
        found = []
        with connections[USING].execute_wrapper(
            lambda *args: explain(*args) if "SELECT 7" not in args[1] else args[0](*args[1:])
        ):
            run(USING, lambda session: found.append(session.ask(f"SELECT COUNT(*) FROM {TABLE}")()))
        return found

    assert in_subscriber(work) == [[(0,)]]


def test_parameters_by_name(db):
    def operation(session):
        session.later(INSERT, ("a", 1))
        with connections[USING].cursor() as cursor:
            cursor.execute(f"SELECT name FROM {TABLE} WHERE value = %(value)s", {"value": 1})
            return cursor.fetchall()

    assert in_subscriber(lambda: run(USING, operation)) == (("a",),)


def test_a_transaction_that_sends_nothing_leaves_a_session_at_rest(db):
    def work():
        sessions.rest(USING)
        with transaction.atomic(USING):
            pass
        with rolled_back():
            pass
        assert sessions.rests(USING)
        with transaction.atomic(USING):
            return Session(USING).row("SELECT @@wait_timeout")[0]

    assert in_subscriber(work) == 60


def test_hooks_run_on_a_connection_as_it_was(db):
    seen = []

    def hook():
        seen.append((packets_of(connections[USING]), connections[USING].execute_wrappers))

    own = connections[USING]
    with together(own), transaction.atomic():
        Session(USING).later(INSERT, ("a", 1))
        transaction.on_commit(hook)
    with together(own), rolled_back():
        Session(USING).later(INSERT, ("b", 1))
    assert seen == [(None, [])]
    assert vars(own).keys().isdisjoint({"_commit", "_rollback", "_start_transaction_under_autocommit"})
    assert names() == ["a"]


# -- the end of an atomic handler's transaction ----------------------------------


def in_handler_thread(one, publish_one):
    """Let an atomic handler handle a message in a thread as that of a handler; return what is sent meanwhile."""

    def work():
        connections[USING].ends_together = True
        sub = Sub(one)
        publish_one()
        sub.step(times=3)
        with sent() as packets:
            sub.work()
        sub.flush()
        assert connections[USING].get_autocommit()
        assert packets_of(connections[USING]) is None
        assert connections[USING].execute_wrappers == []
        return packets

    return in_thread(work)


def handled(function):
    return in_handler_thread(handler(function=function, atomic=True), lambda: publish("t", 1, key="k"))


@pytest.mark.promise("Exactly-once effects")
def test_the_ack_of_an_atomic_handler_is_sent_with_the_commit(db):
    packets = handled(lambda delivery: Effect.objects.create(name="a", value=1))
    (end,) = (packet for packet in packets if "acked" in packet)
    assert end.endswith("; COMMIT; SET autocommit=1")
    assert "INSERT" not in end, "the handler's own statements wait for nothing"
    assert names() == ["a"]
    assert lag() == 0


@pytest.mark.promise("Exactly-once effects")
def test_an_ack_that_comes_too_late_keeps_the_commit_from_being_executed(db):
    def revoked(delivery):
        Effect.objects.create(name="a", value=1)
        in_thread(lambda: DeliveryState.objects.update(delivery_token=7))

    handled(revoked)
    assert names() == []
    assert lag() == 1


@pytest.fixture
def job_handler(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    return registry.handlers()[job_worlds.JOBS]


@pytest.mark.promise("Exactly-once effects")
def test_the_result_of_an_atomic_job_is_sent_with_its_commit(job_handler):
    packets = in_handler_thread(job_handler, lambda: jobs.write.enqueue(1))
    *_, insert, end = packets
    assert "INSERT" in insert
    assert "SET acked" in end
    assert "SET status" in end
    assert end.endswith("; COMMIT; SET autocommit=1")
    assert len(packets) == 3
    assert (names(), JobResult.objects.get().status) == (["jobs"], "SUCCESSFUL")


@pytest.mark.promise("Exactly-once effects")
def test_a_result_that_has_ended_meanwhile_keeps_the_commit_from_being_executed(job_handler, monkeypatch, caplog):
    def end_it(_):
        in_thread(lambda: JobResult.objects.update(status="FAILED", finished_at=1, errors="mine"))

    monkeypatch.setattr(jobs, "hanging", end_it)
    in_handler_thread(job_handler, jobs.hang_atomic.enqueue)
    assert names() == []
    assert (JobResult.objects.get().status, JobResult.objects.get().errors) == ("FAILED", "mine")
    (lost,) = [record for record in caplog.records if record.getMessage().startswith("delivery.lost")]
    assert "has ended meanwhile: the writes of its task were rolled back" in lost.getMessage()
