"""SQL that begins and ends transactions without Django's knowledge: what is told is what was committed."""

from __future__ import annotations

import logging

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, connection, transaction
from django.db.backends.signals import connection_created
from hypothesis import HealthCheck, given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from django_mysqlqueue import Message, publish, publish_many, subscriber
from django_mysqlqueue.models import DeliveryEvent, DeliveryState, QueueMessage
from django_mysqlqueue.signals import delivery_handled, delivery_settled
from django_mysqlqueue.testing import deliver_all
from tests.app.models import Effect
from tests.support.harness import USING, Sub, handler, in_thread
from tests.support.internals import Action, AfterCommit, Executor, close_connections, sessions, statements
from tests.support.survival import TIMEOUTS, Survival


def sql(*texts):
    for text in texts:
        with connection.cursor() as cursor:
            cursor.execute(text)


def effects():
    return sorted(Effect.objects.values_list("name", flat=True))


LEFT_TABLE = "left_by_a_handler"


@pytest.fixture(autouse=True)
def _drop_what_is_left(db):
    yield
    sql(f"DROP TABLE IF EXISTS {LEFT_TABLE}")


LEAVES_OPEN = [
    "COMMIT AND CHAIN",
    "ROLLBACK AND CHAIN",
    "BEGIN;COMMIT AND CHAIN",
    "SET SESSION completion_type='CHAIN';COMMIT",
    "/*! SET autocommit=0 */",
    "/* a */BEGIN",
    "/* a */ BEGIN /* */",
    "# SELECT\nBEGIN",
    "-- SELECT\nSTART TRANSACTION READ WRITE",
    "(SELECT 1);BEGIN",
    "SELECT 'a;b';BEGIN",
    "XA START 'x'",
]
OF_MARIADB = ["EXECUTE IMMEDIATE 'BEGIN'", "EXECUTE IMMEDIATE 'SET autocommit=0'", "/*M! BEGIN */"]


@pytest.mark.promise("Transactions that a handler leaves open")
@pytest.mark.servers_only
@pytest.mark.parametrize("text", [*LEAVES_OPEN, *OF_MARIADB])
def test_a_transaction_begun_by_sql_fails_the_attempt_and_does_not_reach_the_next_messages(db, engine, text):
    if text in OF_MARIADB and engine != "mariadb":
        pytest.skip("MariaDB's own")

    def act(delivery):
        sql(text)
        Effect.objects.create(name="odd")

    survival = Survival(act, payloads=("odd", "next", "third", "fourth"))
    survival.check(dead=True)
    assert "left a transaction open" in survival.dead[0].last_error
    assert " ".join(text.split()) in survival.dead[0].last_error
    assert effects() == ["fourth", "next", "third"]


@pytest.mark.servers_only
@pytest.mark.parametrize(
    "texts",
    [
        ["BEGIN", "COMMIT"],
        ["BEGIN", "COMMIT AND CHAIN", "ROLLBACK"],
        ["/*! SET autocommit=0 */"],
        ["SET autocommit=0", "COMMIT"],
        ["SET SESSION completion_type='CHAIN'"],
        ["COMMIT"],
        [f"TRUNCATE {Effect._meta.db_table}"],
        ["DO 1", "SHOW TABLES", "EXPLAIN SELECT 1"],
    ],
)
def test_a_session_without_an_open_transaction_fails_nothing(db, texts):
    Survival(lambda delivery: sql(*texts), payloads=("odd", "next", "third")).check(dead=False)
    assert effects() == ["next", "third"]


@pytest.mark.servers_only
def test_a_statement_in_a_session_of_its_own_setting_fails_nothing(db, engine):
    if engine != "mariadb":
        pytest.skip("MariaDB's own")
    Survival(lambda delivery: sql("SET STATEMENT max_statement_time=5 FOR SELECT 1")).check(dead=False)


PROCEDURES = {
    "closes": "SELECT 1; SELECT 2",
    "leaves_open": "START TRANSACTION",
    "commits": "COMMIT",
}


@pytest.fixture
def procedures(db):
    sql(
        *(f"CREATE OR REPLACE PROCEDURE p_{name}() BEGIN {body}; END" for name, body in PROCEDURES.items())
        if (connection.mysql_is_mariadb)
        else (f"CREATE PROCEDURE p_{name}() BEGIN {body}; END" for name, body in PROCEDURES.items())
    )
    yield
    sql(*(f"DROP PROCEDURE p_{name}" for name in PROCEDURES))


@pytest.fixture
def unseen(monkeypatch):
    """The statements that ask for the state of sessions."""
    found = []
    execute = statements.execute_unseen

    def note(connection, statement):
        found.append(statement.split()[0])
        execute(connection, statement)

    monkeypatch.setattr("tests.support.internals.connection.execute_unseen", note)
    monkeypatch.setattr("tests.support.internals.mysql.execute_unseen", note)
    return found


@pytest.mark.servers_only
@pytest.mark.parametrize("atomic", [False, True])
def test_calling_a_procedure_costs_neither_the_connection_nor_the_attempt(procedures, unseen, atomic):
    sessions_used = []

    def note():
        connection.ensure_connection()  # It is open where a call of such a handler has used it before.
        sessions_used.append(connection.connection.thread_id())

    def act(delivery):
        note()
        with connection.cursor() as cursor:
            cursor.execute("CALL p_closes()")
            assert cursor.fetchone() == (1,)
            cursor.execute("SELECT 3")  # It skips the second result.
            assert cursor.fetchone() == (3,)
        Effect.objects.create(name="odd")

    Survival(act, then=note, atomic=atomic).check(dead=False)
    assert effects() == ["next", "odd"]
    if not atomic:
        assert len(set(sessions_used)) == 1
    assert unseen == (["SAVEPOINT", "RELEASE"] if atomic else ["SET"])


@pytest.mark.promise("Transactions that a handler leaves open")
@pytest.mark.servers_only
@pytest.mark.parametrize(("name", "atomic"), [("leaves_open", False), ("leaves_open", True), ("commits", True)])
def test_a_procedure_may_change_the_transaction_too(procedures, name, atomic):
    Survival(lambda delivery: sql(f"CALL p_{name}()"), atomic=atomic).check(dead=True)


@pytest.mark.parametrize("atomic", [False, True])
def test_a_handler_without_such_statements_is_not_asked(db, unseen, atomic):
    def act(delivery):
        with transaction.atomic():
            Effect.objects.create(name="odd")
        publish("other", 1)

    Survival(act, atomic=atomic).check(dead=False)
    assert not unseen


SET_UP = (sessions._set_up, "django_mysqlqueue.runtime.sessions")
WATCH = (sessions._observe, "django_mysqlqueue.runtime.sessions.watch")


@pytest.fixture
def watched_first():
    """The order of receivers where handlers have run in the process before its subscriber has started."""

    def connect(*receivers):
        for receiver, uid in receivers:
            connection_created.disconnect(receiver, dispatch_uid=uid)
        for receiver, uid in receivers:
            connection_created.connect(receiver, dispatch_uid=uid)

    connect(WATCH, SET_UP)
    yield
    connect(SET_UP, WATCH)


def test_a_session_is_not_asked_because_of_its_own_set_up(db, watched_first, unseen):
    Survival(lambda delivery: Effect.objects.create(name="odd")).check(dead=False)
    assert not unseen


ENDS = {
    "ROLLBACK": lambda: sql("ROLLBACK"),
    "COMMIT": lambda: sql("COMMIT"),
    "ROLLBACK and BEGIN": lambda: sql("ROLLBACK", "BEGIN"),
    "COMMIT and BEGIN": lambda: sql("/* a */COMMIT", "BEGIN"),
    "an atomic block left open": lambda: transaction.atomic().__enter__(),
    "an atomic block without a savepoint left open": lambda: transaction.atomic(savepoint=False).__enter__(),
    "the block of the handler left": lambda: connection.atomic_blocks[-1].__exit__(None, None, None),
}
ENDS_ON_SERVERS = {
    "ROLLBACK AND CHAIN": lambda: sql("ROLLBACK AND CHAIN"),
    "COMMIT AND CHAIN": lambda: sql("COMMIT AND CHAIN"),
    "autocommit": lambda: sql("SET autocommit=1"),
    "two statements": lambda: sql("SELECT 1; COMMIT"),
    "DDL": lambda: sql(f"CREATE TABLE IF NOT EXISTS {LEFT_TABLE} (id INT)"),
    "LOCK TABLES": lambda: sql(f"LOCK TABLES {Effect._meta.db_table} WRITE", "UNLOCK TABLES"),
}


def in_a_block(end):
    with transaction.atomic():
        end()


def caught(end):
    try:
        end()
        Effect.objects.count()
    except DatabaseError:
        pass


def caught_and_unmarked(end):
    caught(end)
    if connection.in_atomic_block:
        transaction.set_rollback(False)


WAYS = {"directly": lambda end: end(), "caught": caught, "unmarked": caught_and_unmarked, "in a block": in_a_block}


def _check_that_it_fails(settings, end):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all"}

    def act(delivery):
        end()
        Effect.objects.create(name="afterwards")

    survival = Survival(act, atomic=True, payloads=("odd", "next", "third"))
    survival.check(dead=True)
    assert survival.dead[0].last_error
    assert effects() == ["next", "third"]
    told = [
        outcome for offset, outcome in DeliveryEvent.objects.order_by("id").values_list("message_offset", "outcome")
    ]
    assert sorted(told) == ["acked", "acked", "dead_lettered", "failed"]


@pytest.mark.promise("Exactly-once effects")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ENDS)
def test_an_atomic_handler_that_ends_its_transaction_is_not_acked(db, settings, what, way):
    if way == "in a block" and ("block" in what):
        pytest.skip("the block that it leaves would be its own")
    _check_that_it_fails(settings, lambda: WAYS[way](ENDS[what]))


@pytest.mark.promise("Exactly-once effects")
@pytest.mark.servers_only
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ENDS_ON_SERVERS)
def test_an_atomic_handler_that_ends_its_transaction_by_a_statement_of_the_servers_is_not_acked(
    db, settings, what, way
):
    _check_that_it_fails(settings, lambda: WAYS[way](ENDS_ON_SERVERS[what]))


@pytest.mark.servers_only
def test_what_keeps_the_transaction_of_an_atomic_handler_fails_nothing(procedures):
    def act(delivery):
        Effect.objects.create(name="odd")
        sql("SET SESSION sort_buffer_size = 65536")
        sid = connection.savepoint()
        sql("CALL p_closes()")
        connection.savepoint_commit(sid)
        with transaction.atomic():
            sql("CREATE TEMPORARY TABLE scratch (id INT)", "CALL p_closes()")
        sql("SAVEPOINT mine", "DO 1", "ROLLBACK TO SAVEPOINT mine")
        Effect.objects.create(name="odd")

    Survival(act, atomic=True).check(dead=False)
    assert effects() == ["next", "odd", "odd"]


class Told:
    """The outcomes that the receivers of the signals are told."""

    def __init__(self):
        self.outcomes = []

    def __enter__(self):
        for signal in (delivery_handled, delivery_settled):
            signal.connect(self._hear)
        return self

    def __exit__(self, *error):
        for signal in (delivery_handled, delivery_settled):
            signal.disconnect(self._hear)

    def _hear(self, *, delivery, outcome, **arguments):
        self.outcomes.append((delivery.payload, str(outcome)))


def _check_that_it_is_acked(settings, caplog, act, **options):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all"}
    with Told() as told, caplog.at_level(logging.WARNING, "django_mysqlqueue.subscriber"):
        Survival(act, atomic=True, **options).check(dead=False)
    assert effects() == ["next", "odd"]
    assert list(DeliveryEvent.objects.values_list("outcome", flat=True)) == ["acked", "acked"]
    assert set(told.outcomes) == {("odd", "acked"), ("next", "acked")}
    (record,) = caplog.records
    assert record.mysqlqueue["event"] == "on_commit.failed"
    assert record.exc_info is not None
    assert not isinstance(record.exc_info[1], AfterCommit)


@pytest.mark.promise("Exactly-once effects")
@pytest.mark.parametrize("error", [ValueError("on purpose"), SystemExit(1)])
def test_a_hook_that_fails_after_the_commit_does_not_fail_the_attempt(db, settings, caplog, error):
    def fail():
        raise error

    def act(delivery):
        Effect.objects.create(name="odd")
        transaction.on_commit(fail)

    _check_that_it_is_acked(settings, caplog, act)
    assert caplog.records[0].mysqlqueue["error"]


@pytest.mark.promise("Exactly-once effects")
def test_the_commit_before_a_hook_that_failed_is_not_that_of_the_next_transaction(db):
    """Both are on one connection. The second transaction is rolled back, because its handler closes it."""

    def function(delivery):
        Effect.objects.create(name=delivery.payload)
        if delivery.payload == "commits":
            transaction.on_commit(lambda: 1 / 0)
        else:
            connection.close()

    assert on_one_thread(function, "commits", "lost", atomic=True) == [Action.ACK, Action.NACK]
    assert effects() == ["commits"]


def test_a_hook_that_fails_before_the_commit_of_a_block_fails_the_attempt(db):
    """It is the handler's own transaction: the error is raised inside the handler."""

    def act(delivery):
        with transaction.atomic():
            transaction.on_commit(lambda: 1 / 0)

    Survival(act).check(dead=True)


@pytest.mark.promise("Exactly-once effects")
@pytest.mark.servers_only
def test_a_connection_that_ends_with_the_commit_does_not_fail_the_attempt(db, settings, caplog):
    """With completion_type=2, the server closes it after the COMMIT."""

    def act(delivery):
        Effect.objects.create(name="odd")
        sql("SET SESSION completion_type = 2")

    _check_that_it_is_acked(settings, caplog, act)


def test_a_batch_whose_hook_fails_is_acked(db, caplog):
    def function(deliveries):
        Effect.objects.create(name="batch")
        transaction.on_commit(lambda: 1 / 0)

    def work():
        sub = Sub(handler(function=function, atomic=True, batch=True, batch_size=3))
        sub.settle()
        return not DeliveryState.objects.exists()

    publish_many("t", [Message(number, key="k") for number in range(3)])
    with caplog.at_level(logging.WARNING, "django_mysqlqueue.subscriber"):
        assert in_thread(work)
    assert effects() == ["batch"]
    assert [record.mysqlqueue["event"] for record in caplog.records] == ["on_commit.failed"]


@pytest.mark.parametrize(("atomic", "text"), [(False, "BEGIN"), (True, "ROLLBACK")])
def test_an_async_handler_is_asked_too(db, atomic, text):
    """The code that it calls by sync_to_async runs on the connections of its thread."""

    async def function(delivery):
        if delivery.payload == "odd":
            await sync_to_async(sql)(text)
        await Effect.objects.acreate(name=delivery.payload)

    assert on_one_thread(function, "odd", "next", is_async=True, atomic=atomic) == [Action.NACK, Action.ACK]
    assert effects() == ["next"]


def on_one_thread(function, *payloads, **options):
    """Handle messages as a handler's thread does, once each; return how they were settled."""

    def work():
        sessions.adopt(USING, TIMEOUTS, watch=True)
        sub = Sub(handler(function=function, max_attempts=1, **options))
        executor = Executor(sub.inbox, USING, threads=0, timeouts=TIMEOUTS)
        sub.step()
        found = []
        while (batch := sub.inbox.take(None, wait=False)) is not None:
            settlements = executor._safely(batch)
            found += [settlement.action for settlement in settlements]
            sub.inbox.finish(batch, settlements)
            sub.inbox.leave(batch)
        close_connections()
        sub.flush()
        sub.leave()
        return found

    publish_many("t", [Message(payload, key="k") for payload in payloads])
    return in_thread(work)


# -- what is not of a transaction ---------------------------------------------


def refuse(execute, sql, *arguments):
    if sql.startswith("INSERT"):
        raise ZeroDivisionError("a wrapper that a handler has left")
    return execute(sql, *arguments)


def leave_a_wrapper():
    connection.execute_wrappers.append(refuse)


def leave_it_on_a_new_connection():
    connection.close()
    leave_a_wrapper()
    connection.connect()


def leave_the_mark():
    connection.ensure_connection()
    connection.needs_rollback = True


def remove_the_watch():
    connection.execute_wrappers.clear()


LEFT_BEHIND = {
    "wrapper": leave_a_wrapper,
    "wrapper on a new connection": leave_it_on_a_new_connection,
    "needs_rollback": leave_the_mark,
    "no wrapper": remove_the_watch,
}


@pytest.mark.parametrize("what", LEFT_BEHIND)
@pytest.mark.parametrize("payloads", [("odd", "next", "third"), ("first", "odd", "next")])
def test_what_a_handler_leaves_on_its_connection_does_not_reach_the_next_message(db, what, payloads):
    watched = []

    def act(delivery):
        LEFT_BEHIND[what]()

    Survival(act, payloads=payloads, then=lambda: watched.append([*connection.execute_wrappers])).check(dead=False)
    assert effects() == sorted(set(payloads) - {"odd"})
    assert len(watched[-1]) <= 1
    assert refuse not in watched[-1]


def test_a_handler_leaves_no_debug_log(db):
    found = []

    def act(delivery):
        connection.force_debug_cursor = True

    Survival(act, then=lambda: found.append(connection.force_debug_cursor)).check(dead=False)
    assert found == [False]


# -- in tests ------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
def test_deliver_all_finds_an_atomic_handler_that_ends_its_transaction(db, no_handlers, inside):
    """In a TestCase, too, whose own transaction stays."""

    @subscriber("t", group="g", atomic=True, max_attempts=1)
    def leaves(delivery):
        transaction.atomic().__enter__()
        Effect.objects.create(name="left")

    def run():
        publish("t", 1)
        (delivered,) = deliver_all(raise_exceptions=False)
        return delivered

    if inside:
        with transaction.atomic():
            with transaction.atomic():
                delivered = run()
                assert len(connection.atomic_blocks) == 2
            assert not effects()
    else:
        delivered = run()
    assert delivered.outcome == "dead_lettered"
    assert "left a transaction open" in delivered.error
    assert not effects()
    assert not connection.in_atomic_block


@pytest.mark.parametrize("text", ["ROLLBACK", "COMMIT"])
def test_deliver_all_finds_sql_that_ends_the_transaction(db, no_handlers, text):
    @subscriber("t", group="g", atomic=True, max_attempts=1)
    def ends(delivery):
        sql(text)
        Effect.objects.create(name="after")

    publish("t", 1)
    (delivered,) = deliver_all(raise_exceptions=False)
    assert delivered.outcome == "dead_lettered"
    assert f"{text} ended the transaction" in delivered.error
    assert not effects()


def test_deliver_all_finds_a_transaction_that_sql_has_begun(db, no_handlers):
    @subscriber("t", group="g", max_attempts=1)
    def begins(delivery):
        sql("BEGIN")
        Effect.objects.create(name="left")

    publish("t", 1)
    wrappers = [*connection.execute_wrappers]
    (delivered,) = deliver_all(raise_exceptions=False)
    assert delivered.outcome == "dead_lettered"
    Effect.objects.create(name="mine")
    close_connections()
    assert effects() == ["mine"]
    assert connection.execute_wrappers == wrappers


# -- any of them, in any order ---------------------------------------------------

STEPS = {
    "write": lambda: Effect.objects.create(name="step"),
    "block": lambda: in_a_block(lambda: Effect.objects.create(name="step")),
    "BEGIN": lambda: sql("BEGIN"),
    "COMMIT": lambda: sql("COMMIT"),
    "ROLLBACK": lambda: sql("ROLLBACK"),
    "COMMIT AND CHAIN": lambda: sql("COMMIT AND CHAIN"),
    "chain": lambda: sql("SET SESSION completion_type = 1"),
    "release": lambda: sql("SET SESSION completion_type = 2"),
    "autocommit off": lambda: sql("/*! SET autocommit = 0 */"),
    "autocommit on": lambda: sql("SET autocommit = 1"),
    "savepoint": lambda: sql("SAVEPOINT one"),
    "DDL": lambda: sql(f"CREATE TABLE IF NOT EXISTS {LEFT_TABLE} (id INT)"),
    "enter": lambda: transaction.atomic().__enter__(),
    "close": lambda: connection.close(),
}


@pytest.mark.promise("Exactly-once effects")
@pytest.mark.servers_only
@pytest.mark.parametrize("atomic", [False, True])
@example_settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5))
def test_whatever_a_handler_does_to_its_transaction_what_is_acked_is_committed(db, atomic, steps):
    Effect.objects.all().delete()
    QueueMessage.objects.all().delete()
    DeliveryState.objects.all().delete()

    def function(delivery):
        Effect.objects.create(name=f"{delivery.payload} first")
        if delivery.payload == "odd":
            for step in steps:
                STEPS[step]()
        Effect.objects.create(name=f"{delivery.payload} last")

    odd, *others = on_one_thread(function, "odd", "next", "third", atomic=atomic)
    assert others == [Action.ACK, Action.ACK]
    found = effects()
    assert [name for name in found if not name.startswith(("odd", "step"))] == [
        "next first",
        "next last",
        "third first",
        "third last",
    ]
    if atomic:
        assert ("odd last" in found) == (odd is Action.ACK)
        if odd is Action.ACK:
            assert "odd first" in found
