"""Database errors that an atomic handler catches: its attempt fails unless the transaction is as it was."""

from __future__ import annotations

import contextlib

import pytest
from django.db import DatabaseError, IntegrityError, connection, connections, transaction

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import DeliveryState
from tests.app.models import Effect
from tests.support.harness import USING, Sub, handler, holding, in_thread
from tests.support.internals import LOCK_WAIT_TIMEOUT, STATEMENT_ERRORS, dialect_of, sessions
from tests.support.private_servers import alias_of, private_server

TIMEOUTS = sessions.Timeouts(idle=60, lock_wait=1, network=10, read=30)
SERVER = "rolls_back_on_timeout"
TABLE = """
CREATE TABLE scratch (
    id INT PRIMARY KEY, small TINYINT, short VARCHAR(3), kind ENUM('a'), day DATE, needed INT NOT NULL, positive INT,
    doc JSON, parent INT, CHECK (positive > 0), FOREIGN KEY (parent) REFERENCES scratch_parent (id)
)
"""
TRIGGER = """
CREATE TRIGGER scratch_refuses BEFORE INSERT ON scratch FOR EACH ROW
IF NEW.short = 'no' THEN SIGNAL SQLSTATE '45000'; END IF
"""
SCRATCH = (
    "CREATE TABLE scratch_parent (id INT PRIMARY KEY)",
    TABLE,
    TRIGGER,
    "INSERT INTO scratch_parent VALUES (1)",
    "INSERT INTO scratch (id, needed, parent) VALUES (1, 1, 1), (2, 1, NULL)",
)
PROVOKED = {
    1048: "INSERT INTO scratch (id, needed) VALUES (3, NULL)",
    1054: "SELECT nothing FROM scratch",
    1062: "INSERT INTO scratch (id, needed) VALUES (1, 1)",
    1064: "SELECT FROM WHERE",
    1136: "INSERT INTO scratch (id, needed) VALUES (3)",
    1146: "SELECT 1 FROM scratch_nowhere",
    1242: "UPDATE scratch SET short = 'x' WHERE id = (SELECT id FROM (SELECT id FROM scratch) s)",
    1264: "UPDATE scratch SET small = 1000",
    1265: "UPDATE scratch SET kind = 'b'",
    1292: "UPDATE scratch SET day = 'soon'",
    1364: "INSERT INTO scratch (id) VALUES (3)",
    1365: "UPDATE scratch SET small = 1 / 0",
    1366: "UPDATE scratch SET needed = 'many'",
    1406: "UPDATE scratch SET short = 'much too long'",
    1451: "DELETE FROM scratch_parent",
    1452: "UPDATE scratch SET parent = 2",
    1644: "INSERT INTO scratch (id, needed, short) VALUES (3, 1, 'no')",
    1690: "SELECT 9223372036854775807 + small FROM (SELECT 1 AS small) s",
    3572: "SELECT 1 FROM scratch WHERE id = 2 FOR UPDATE NOWAIT",
    1969: "UPDATE scratch SET short = 'x' WHERE SLEEP(5) = 0",
    3024: "SELECT COUNT(*) FROM information_schema.columns a, information_schema.columns b, scratch c",
    3140: "UPDATE scratch SET doc = 'x'",
    3819: "UPDATE scratch SET positive = -1",
    4025: "UPDATE scratch SET positive = -1",
}
"""A statement for each error that is known to leave the transaction as it was."""
OF_ONE_ENGINE = {1969: "mariadb", 4025: "mariadb", 3024: "mysql", 3140: "mysql", 3572: "mysql", 3819: "mysql"}
LIMITED = {
    1969: "SET SESSION max_statement_time = 0.1",
    3024: "SET SESSION max_execution_time = 100",
}


def test_every_error_that_is_known_to_be_harmless_is_provoked():
    assert set(PROVOKED) == STATEMENT_ERRORS


@pytest.fixture
def scratch(db):
    sql(*SCRATCH)
    yield
    sql("DROP TABLE scratch", "DROP TABLE scratch_parent")


def sql(*statements, using=USING):
    with connections[using].cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


@pytest.mark.servers_only
@pytest.mark.parametrize("code", PROVOKED)
def test_an_error_that_is_known_to_be_harmless_leaves_the_transaction_as_it_was(scratch, code):
    if OF_ONE_ENGINE.get(code, dialect_of(connection).name) != dialect_of(connection).name:
        pytest.skip(f"the other server's: {code}")

    def work():
        sessions.adopt(USING, TIMEOUTS, watch=True)
        sql(*([LIMITED[code]] if code in LIMITED else []))
        with transaction.atomic():
            Effect.objects.create(name="before")
            with pytest.raises(DatabaseError) as caught:
                sql(PROVOKED[code])
            Effect.objects.create(name="after")
        return caught.value.args[0]

    lock = "SELECT 1 FROM scratch WHERE id = 2 FOR UPDATE"
    with holding(lambda: sql(lock)) if code == 3572 else contextlib.nullcontext():
        assert in_thread(work) == code
    assert effects() == ["after", "before"]


def effects(using=USING):
    return sorted(Effect.objects.using(using).exclude(name="locked").values_list("name", flat=True))


class Attempts:
    """A handler that catches an error between two writes at its first attempt; the second one is a plain one."""

    def __init__(self, provoke, using=USING):
        self.provoke, self.using, self.caught = provoke, using, []

    def __call__(self, delivery):
        if delivery.attempt > 1:
            Effect.objects.using(self.using).create(name="second attempt")
            return
        Effect.objects.using(self.using).create(name="before")
        try:
            self.provoke()
        except DatabaseError as error:
            self.caught.append(error.args[0])
        Effect.objects.using(self.using).create(name="after")

    def run(self):
        """Handles one message until it is settled; returns the attempts that failed and what they said."""

        def work():
            sessions.adopt(self.using, TIMEOUTS, watch=True)
            sub = Sub(handler(function=self, atomic=True), using=self.using)
            sub.step()
            sub.work(1)
            sub.flush()
            failed = [
                (one.retry_count, one.last_error) for one in DeliveryState.objects.using(self.using).filter(acked=False)
            ]
            sub.settle()
            sub.leave()
            return failed

        publish_many("t", [Message(1, key="k")], using=self.using)
        failed = in_thread(work)
        assert not DeliveryState.objects.using(self.using).filter(acked=False).exists()
        return failed


@contextlib.contextmanager
def a_locked_row(using=USING):
    locked = Effect.objects.using(using).create(name="locked")
    lock = f"SELECT id FROM {Effect._meta.db_table} WHERE id = {locked.pk} FOR UPDATE"
    with holding(lambda: sql(lock, using=using), using):
        yield locked


def _by_sql(locked, using):
    sql(f"SELECT id FROM {Effect._meta.db_table} WHERE id = {locked.pk} FOR UPDATE", using=using)


def _by_queryset(locked, using):
    list(Effect.objects.using(using).select_for_update().filter(pk=locked.pk))


def _nowait(locked, using):
    list(Effect.objects.using(using).select_for_update(nowait=True).filter(pk=locked.pk))


def _in_a_savepoint(locked, using):
    with transaction.atomic(using):
        _by_queryset(locked, using)


LOCKING = {"raw cursor": _by_sql, "queryset": _by_queryset, "nowait": _nowait, "savepoint": _in_a_savepoint}


@pytest.fixture(scope="module")
def rolls_back_on_timeout(_database):
    with private_server("--innodb-rollback-on-timeout=ON") as server, alias_of(server, SERVER) as alias:
        yield alias


@pytest.mark.promise("Exactly-once effects")
@pytest.mark.servers_only
@pytest.mark.parametrize("how", LOCKING)
def test_a_lock_wait_that_ends_the_transaction_fails_the_attempt(rolls_back_on_timeout, how):
    """The server has rolled back the first write: the second and the ack must not be committed without it."""
    Effect.objects.using(SERVER).all().delete()
    with a_locked_row(SERVER) as locked:
        attempts = Attempts(lambda: LOCKING[how](locked, SERVER), SERVER)
        failed = attempts.run()
    if attempts.caught == [3572]:  # MySQL has an error of its own for NOWAIT, which leaves the transaction alone
        assert how == "nowait"
        assert (failed, effects(SERVER)) == ([], ["after", "before"])
        return
    assert attempts.caught == [LOCK_WAIT_TIMEOUT]
    assert [count for count, _ in failed] == [1]
    assert "1205" in failed[0][1]
    assert effects(SERVER) == ["second attempt"]


@pytest.mark.servers_only
@pytest.mark.parametrize("how", LOCKING)
def test_a_lock_wait_that_ends_its_statement_alone_may_be_caught(db, how):
    with a_locked_row() as locked:
        attempts = Attempts(lambda: LOCKING[how](locked, USING))
        assert attempts.run() == []
    assert attempts.caught in ([LOCK_WAIT_TIMEOUT], [3572])
    assert effects() == ["after", "before"]


@pytest.mark.promise("Exactly-once effects")
@pytest.mark.servers_only
@pytest.mark.parametrize("statement", ["SELECT nobody_knows_this_function()", "CALL nobody_knows_this_procedure()"])
def test_an_error_that_is_not_known_to_be_harmless_fails_the_attempt(db, statement):
    attempts = Attempts(lambda: sql(statement))
    assert [count for count, _ in attempts.run()] == [1]
    assert attempts.caught
    assert effects() == ["second attempt"]


@pytest.mark.servers_only
def test_a_savepoint_proves_that_the_transaction_is_as_it_was(db):
    def in_a_savepoint():
        with transaction.atomic():
            sql("SELECT nobody_knows_this_function()")

    attempts = Attempts(in_a_savepoint)
    assert attempts.run() == []
    assert attempts.caught
    assert effects() == ["after", "before"]


def _swallow(provoke):
    with contextlib.suppress(DatabaseError):
        provoke()


@pytest.mark.servers_only
@pytest.mark.parametrize("atomic", [True, False])
def test_an_error_that_is_caught_inside_a_savepoint_loses_nothing(db, atomic):
    """At the end of a block that is marked Django rolls back without a word, and the message would be acked."""
    attempts = []

    def function(delivery):
        attempts.append(delivery.attempt)
        with transaction.atomic():
            Effect.objects.create(name="before")
            _swallow(lambda: sql("CALL nobody_knows_this_procedure()"))

    def work():
        sessions.adopt(USING, TIMEOUTS, watch=True)
        sub = Sub(handler(function=function, atomic=atomic))
        sub.settle()
        sub.leave()

    publish_many("t", [Message(1, key="k")])
    in_thread(work)
    assert attempts == [1]
    assert effects() == ["before"]


@pytest.mark.servers_only
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_rolled_back_transaction_is_found_at_the_end_of_a_savepoint(rolls_back_on_timeout, goes_on):
    Effect.objects.using(SERVER).all().delete()
    with a_locked_row(SERVER) as locked:

        def provoke():
            with transaction.atomic(SERVER):
                Effect.objects.using(SERVER).create(name="inner before")
                _swallow(lambda: _by_sql(locked, SERVER))
                if goes_on:
                    Effect.objects.using(SERVER).create(name="inner after")

        attempts = Attempts(provoke, SERVER)
        failed = attempts.run()
    assert [count for count, _ in failed] == [1]
    assert effects(SERVER) == ["second attempt"]


@pytest.mark.servers_only
@pytest.mark.parametrize(
    ("statement", "kept"),
    [
        ("INSERT INTO t VALUES (%s)", True),
        ("\n  /* why */ -- and\n insert into t values (1);\n", True),
        ("(SELECT 1) UNION (SELECT 2)", True),
        ("CALL p()", False),
        ("/*! CALL p() */", False),
        ("ROLLBACK", False),
        ("SET x = 1", False),
        ("INSERT INTO t VALUES (1); ROLLBACK", False),
    ],
)
def test_only_statements_that_cannot_end_a_transaction_are_believed(db, statement, kept):
    from django_mysqlqueue.sql.connection import keeps_transaction

    connection.ensure_connection()
    assert keeps_transaction(connection, statement, IntegrityError(1062, "duplicate")) is kept
    assert keeps_transaction(connection, statement, IntegrityError("not all arguments converted"))


def test_sqlite_says_itself_that_it_has_rolled_back_everything(db):
    if connection.vendor != "sqlite":
        pytest.skip("SQLite's own")
    Effect.objects.create(pk=1, name="locked")
    table = Effect._meta.db_table
    attempts = Attempts(lambda: sql(f"INSERT OR ROLLBACK INTO {table} (id, name, value) VALUES (1, 'twice', 0)"))
    assert [count for count, _ in attempts.run()] == [1]
    assert effects() == ["second attempt"]
    Effect.objects.exclude(name="locked").delete()
    attempts = Attempts(lambda: sql(f"INSERT INTO {table} (id, name, value) VALUES (1, 'twice', 0)"))
    assert attempts.run() == []
    assert effects() == ["after", "before"]
