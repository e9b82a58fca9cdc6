"""What ``queuegrants`` prints is enough for each role, no more than it needs, and the server refuses the rest."""

from __future__ import annotations

import io
import itertools
import re

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import connection, connections, router
from django.db.utils import OperationalError

from django_mysqlqueue import Message, cancel, operations, publish, publish_many, reschedule
from django_mysqlqueue.checks.grants import MIGRATIONS, READ, ROLES, Grant
from django_mysqlqueue.management.spark import project_place
from django_mysqlqueue.models import ConsumerGroup, DebouncedMessage, Operation, OutboxMessage, QueueMessage
from django_mysqlqueue.tails import tail
from pyspark_mysqlqueue.log_schema import READERS
from tests.app.models import Effect
from tests.conftest import QUEUE_MODELS
from tests.support.harness import USING, sequence
from tests.support.internals import GroupRef, groups, installing
from tests.support.processes import Worker, environment, wait_for
from tests.support.roles import DENIED, PASSWORD, account, denied, user_of
from tests.support.sql_clients import Client

pytestmark = pytest.mark.servers_only

WRITE = ("publisher", "scheduler", "subscriber", "operator")
"""Roles whose privileges are no more than the statements of their work need; the others read."""
RUNS = {"INSERT": "INSERT INTO {t} ({c}) SELECT NULL FROM DUAL WHERE 1 = 0", "UPDATE": "UPDATE {t} SET {c} = NULL"}


@pytest.fixture
def use(db):
    """Makes this thread work as a user of a role, on the alias ``default``."""
    admin = connections[USING]

    class Use:
        def __init__(self, role):
            self._account = account(role)

        def __enter__(self):
            own = self._account.__enter__()
            connections[USING] = own
            return own

        def __exit__(self, *error):
            connections[USING] = admin
            self._account.__exit__(*error)

    yield Use
    connections[USING] = admin


# -- statements ------------------------------------------------------------------


@pytest.mark.promise("Roles")
@pytest.mark.timeout(240)
def test_each_role_may_send_what_its_work_sends_and_needs_all_that_it_has(db, sent):
    """In the scripted life of the queue. EXPLAIN checks privileges as the statement itself does."""
    refused, unneeded = [], []
    for role in ("publisher", "scheduler", "subscriber", "reader", "operator"):
        statements = list(sent.of_roles.of[role].values())
        assert len(statements) >= {"publisher": 2, "scheduler": 8}.get(role, 80), role
        with account(role) as own:
            refused += [(role, sql[:200]) for sql, parameters in statements if denied(own, sql, parameters)]
            unneeded += [(role, one) for one in _pieces(role) if not _is_needed(role, own, one, statements)]
    assert refused == []
    assert "; ".join(f"{role}: {one.privilege} {one.name}" for role, one in unneeded) == ""


def _pieces(role):
    """The privileges to take away one at a time: those on columns column by column."""
    if role not in WRITE:
        return
    for grant in ROLES[role].grants:
        if grant in READ and role == "operator":
            continue  # it reads everything
        if grant.name == MIGRATIONS:
            continue  # of commands
        for column in grant.columns or (None,):
            yield Grant(grant.privilege, grant.name, () if column is None else (column,))


def _is_needed(role, own, one, sent):
    what = one.privilege + (f" (`{one.columns[0]}`)" if one.columns else "")
    on = f"ON `{connection.settings_dict['NAME']}`.`{one.name}`"
    with connection.cursor() as cursor:
        cursor.execute(f"REVOKE {what} {on} FROM '{user_of(role)}'@'%%'", [])
        try:
            return any(denied(own, sql, parameters) for sql, parameters in sent if one.name in sql)
        finally:
            cursor.execute(f"GRANT {what} {on} TO '{user_of(role)}'@'%%'", [])


@pytest.mark.promise("Roles")
@pytest.mark.parametrize("role", ROLES)
def test_the_server_refuses_every_table_and_column_outside_a_role(db, role):
    if role == "sql-consumer":
        installing.install(USING)
    with account(role) as own:
        for model in QUEUE_MODELS:
            table = model._meta.db_table
            columns = [one.column for one in model._meta.local_concrete_fields if not one.generated]
            for privilege, column in itertools.product(("SELECT", "INSERT", "UPDATE", "DELETE"), columns):
                allowed = any(
                    one.name == table and one.privilege == privilege and column in (one.columns or columns)
                    for one in ROLES[role].grants
                )
                statement = {
                    "SELECT": f"SELECT `{column}` FROM {table}",
                    "DELETE": f"DELETE FROM {table}",
                    "INSERT": f"INSERT INTO {table} (`{column}`) SELECT NULL FROM DUAL WHERE 1 = 0",
                    "UPDATE": f"UPDATE {table} SET `{column}` = NULL",
                }[privilege]
                assert denied(own, statement) is not allowed, (privilege, table, column)
        for model in apps.get_app_config("auth").get_models():
            assert denied(own, f"SELECT 1 FROM {model._meta.db_table}"), "the project's tables"
        for statement in (
            "CREATE TABLE queue_of_mine (id INT)",
            "ALTER TABLE queue_outbox COMMENT 'mine'",
            "DROP TABLE IF EXISTS queue_of_mine",
            "LOCK TABLES queue_outbox WRITE",
            f"GRANT SELECT ON queue_outbox TO '{user_of(role)}'@'%%'",
        ):
            with pytest.raises(OperationalError) as refusal, own.cursor() as cursor:
                cursor.execute(statement, [])
            assert refusal.value.args[0] in (*DENIED, 1044), statement


# -- whole work ------------------------------------------------------------------


@pytest.mark.promise("Roles")
def test_a_publisher_publishes_and_forges_nothing(use):
    with use("publisher") as own:
        publish("t", 1, key="k", id="i", metadata={"a": 1}, delay=60, priority=3, expires_in=90, coalesce=None)
        publish_many("t", (Message(n, coalesce="c") for n in range(2000)))
        for column in ("failed_group", "original_id", "last_error", "target_group", "failure_count"):
            with pytest.raises(OperationalError) as refusal, own.cursor() as cursor:
                cursor.execute(f"INSERT INTO queue_outbox (topic, payload, {column}) VALUES ('t_dlq', '1', '1')")
            assert refusal.value.args[0] in DENIED
        with pytest.raises(OperationalError):
            OutboxMessage.objects.exists()
        with pytest.raises(OperationalError):
            cancel("i", topic="t")
    assert OutboxMessage.objects.count() == 2001


@pytest.mark.promise("Roles")
def test_a_scheduler_debounces_cancels_and_reschedules(use):
    with use("scheduler"):
        publish("t", 1, id="i", delay=60)
        publish("t", 1, id="j", delay=60)
        for number in range(3):
            publish("t", number, coalesce="c", delay=60, max_delay=90)
        assert cancel("i", topic="t") == 1
        assert reschedule("j", topic="t", delay=90) == 1
    assert DebouncedMessage.objects.count() == 3


@pytest.mark.promise("Roles")
@pytest.mark.processes
def test_a_subscriber_runs_with_gc_and_dead_letters(db, tmp_path):
    with account("subscriber"), connection.cursor() as cursor:
        # The handlers' own table, which is the project's.
        cursor.execute(
            f"GRANT SELECT, INSERT ON `{connection.settings_dict['NAME']}`.`{Effect._meta.db_table}` "
            f"TO '{user_of('subscriber')}'@'%%'",
            [],
        )
        # Since Django 6.1, system checks connect to each database of the project; the tests have one more.
        cursor.execute(
            f"GRANT SELECT ON `{connections['queue'].settings_dict['NAME']}`.* TO '{user_of('subscriber')}'@'%%'", []
        )
        env = environment(RETENTION=0, ORPHAN_RETENTION=0, MAX_ATTEMPTS=2, BACKOFF={"initial": 0.01})
        env["DATABASE_URL"] = re.sub(r"//[^@]*@", f"//{user_of('subscriber')}:{PASSWORD}@", env["DATABASE_URL"])
        worker = Worker(tmp_path, "--group", "plain", "--group", "atomic", "--group", "shared", whole_env=env)
        try:
            wait_for(worker.is_ready, worker)
            for topic in ("p.plain", "p.shared"):
                publish_many(topic, (Message({"n": n}, key=f"k{n % 3}") for n in range(20)))
            wait_for(lambda: Effect.objects.count() >= 20, worker)
            wait_for(lambda: not OutboxMessage.objects.exists(), worker)
            assert "denied" not in worker.output
            worker.process.terminate()
            assert worker.wait() == 0
        finally:
            worker.end()
    assert "denied" not in worker.output


@pytest.mark.promise("Roles")
def test_a_client_in_plain_sql_has_the_procedures_alone(db):
    installing.install(USING)
    groups.register(USING, GroupRef("g", "t"), mode="shared", start="earliest")
    publish_many("t", (Message(n, key="k") for n in range(6)))
    sequence()
    with account("sql-consumer"):
        client = Client(user=user_of("sql-consumer"), passwd=PASSWORD)
        try:
            handles = [row["handle"] for row in client.claim()]
            settled = [client.ack(handles[0]), client.nack(handles[1]), client.reject(handles[2])]
            assert settled == ["acked", "failed", "dead_lettered"]
            assert [client.snooze(handles[3]), client.extend(handles[4])] == ["snoozed", "extended"]
            for statement in ("SELECT 1 FROM queue_messages", "CALL queue__find('g', 't', 1)"):
                with pytest.raises(Exception, match="denied"):
                    client.run(statement)
        finally:
            client.close()


@pytest.mark.promise("Roles")
def test_a_reader_sees_everything_and_changes_nothing(use, capsys):
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    publish("t", 1, key="k")
    sequence()
    with use("reader"):
        for command in (
            ["queuestatus"],
            ["queuehealth"],
            ["queuescheduled"],
            ["queuetail", "t"],
            ["queueset"],
            ["queueoperations"],
        ):
            call_command(*command)
        assert [one.payload for one in tail("t")] == [1]
        with pytest.raises(OperationalError, match="denied"):
            operations.pause("g", "t", actor="test")
        with pytest.raises(OperationalError, match="denied"):
            publish("t", 1)
    assert not ConsumerGroup.objects.get().paused


@pytest.mark.promise("Roles")
def test_an_operator_operates_on_record(use, capsys):
    for name in ("g", "other"):
        groups.register(USING, GroupRef(name, "t"), mode="ordered", start="earliest")
    publish_many("t", (Message(n, key="k") for n in range(5)))
    publish("t", 1, id="later", delay=600)
    sequence()
    with use("operator"):
        for line in (
            "queuepause g t",
            "queueresume g t",
            "queueset g t max_attempts=3",
            "queueseek g t latest",
            "queueseek g t earliest",
            "queuescheduled t later --at 2100-01-01T00:00",
            "queuecancel t later",
            "queuegroupmode g t shared",
            "queuedropgroup other t",
        ):
            call_command(*line.split(), "--noinput")
    assert Operation.objects.count() == 9


@pytest.mark.promise("Roles")
def test_an_archiver_reads_the_log_and_moves_its_reader(db):
    """What of the archive runs on the database; tests/pipeline has the rest."""
    publish("t", 1)
    sequence()
    with account("archiver") as own:
        with own.cursor() as cursor:
            cursor.execute("SELECT `offset`, payload FROM queue_messages")
            assert len(cursor.fetchall()) == 1
        for statement, parameters in (
            ("UPDATE queue_sequencer SET epoch = %s WHERE id = 1", (1,)),
            (f"SELECT read_offset FROM {READERS}", ()),
            (f"INSERT INTO {READERS} (name, read_offset) VALUES (%s, 2)", ("archive",)),
            (f"DELETE FROM {READERS} WHERE name = %s", ("archive",)),
        ):
            assert not denied(own, statement, parameters)
    assert project_place(USING)
    assert router.db_for_read(QueueMessage) == USING


# -- the command -----------------------------------------------------------------


def test_the_account_is_quoted(db):
    printed = io.StringIO()
    call_command("queuegrants", "--role", "publisher", "--user", "o'neil@10.0.%", stdout=printed)
    comment, statement, *_ = printed.getvalue().splitlines()
    assert comment.startswith("-- publisher: publish messages")
    assert statement.endswith(f"ON `{connection.settings_dict['NAME']}`.`queue_outbox` TO 'o''neil'@'10.0.%';")


@pytest.mark.parametrize("user", ["@host", "a\\b", "a\nb"])
def test_a_bad_account_is_named_with_the_rule(db, user):
    with pytest.raises(CommandError, match="must be USER or USER@HOST"):
        call_command("queuegrants", "--role", "reader", "--user", user)
