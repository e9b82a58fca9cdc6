"""``manage.py queueprocedures``, the check, and groups of ``SQL_TOPICS``."""

from __future__ import annotations

import re

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection

from django_mysqlqueue import inspection, operations, publish, subscriber
from django_mysqlqueue.checks import system as checks
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.options import conf
from tests.support.harness import USING, sequence
from tests.support.internals import GroupRef, installing, register_groups, registry
from tests.support.internals import procedures as definitions
from tests.support.paths import ROOT
from tests.support.sql_clients import Client, register

servers_only = pytest.mark.servers_only
PUBLIC = {"queue_claim", "queue_ack", "queue_nack", "queue_reject", "queue_snooze", "queue_extend"}


@pytest.fixture
def none_installed(db):
    if connection.vendor == "mysql":
        installing.remove(USING)
    yield
    if connection.vendor == "mysql":
        installing.remove(USING)


def run(capsys, *arguments):
    call_command("queueprocedures", *arguments)
    return capsys.readouterr().out


def found():
    return [one.id for one in checks.check_procedures(databases=[USING])]


@servers_only
def test_procedures_are_installed_updated_and_removed(none_installed, capsys, settings):
    assert re.fullmatch(r"Installed \d+ procedures\.\n", run(capsys))
    assert installing.state(USING).is_current
    assert run(capsys) == "The procedures are up to date.\n"
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "DLQ_SUFFIX": "_dead"}
    assert re.fullmatch(r"Replaced \d+ procedures\.\n", run(capsys))
    with connection.cursor() as cursor:
        cursor.execute("CREATE PROCEDURE queue__old() COMMENT 'django-mysqlqueue 0.0.1 x' BEGIN END")
        cursor.execute("DROP PROCEDURE queue_ack")
    assert run(capsys) == "Installed 1 procedure.\nRemoved 1 procedure.\n"
    assert re.fullmatch(r"Removed \d+ procedures\.\n", run(capsys, "--remove"))
    assert run(capsys, "--remove") == "Removed 0 procedures.\n"


@servers_only
def test_what_differs_is_said_without_changing_it(none_installed, capsys):
    with pytest.raises(SystemExit) as caught:
        run(capsys, "--check")
    assert caught.value.code == 1
    assert "To be installed: queue__" in capsys.readouterr().out
    assert not installing.state(USING).is_installed
    run(capsys)
    assert run(capsys, "--check") == "The procedures are up to date.\n"


@servers_only
def test_the_statements_can_be_printed(none_installed, capsys):
    text = run(capsys, "--print")
    session, text = text.split("DELIMITER //\n")
    assert session == "SET NAMES utf8mb4;\nSET SESSION sql_mode = 'STRICT_TRANS_TABLES';\n"
    assert text.endswith("DELIMITER ;\n")
    assert text.count("CREATE PROCEDURE") == len(installing.wanted(USING))
    assert not installing.state(USING).is_installed
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@SESSION.sql_mode")
        (mode,) = cursor.fetchone()
        for statement in (*session.split(";\n"), *text.removesuffix("DELIMITER ;\n").split("//\n")):
            if statement.strip():
                cursor.execute(statement)
        cursor.execute("SET SESSION sql_mode = %s", (mode,))
    assert installing.state(USING).is_current


@servers_only
@pytest.mark.parametrize(
    ("variable", "value"), [("sql_mode", "NO_BACKSLASH_ESCAPES"), ("sql_mode", ""), ("character_set_client", "latin1")]
)
def test_the_session_that_installs_them_has_no_influence(none_installed, variable, value):
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT @@SESSION.{variable}")
        (before,) = cursor.fetchone()
        cursor.execute(f"SET SESSION {variable} = %s", (value,))
        try:
            installing.install(USING)
            cursor.execute(f"SELECT @@SESSION.{variable}")
            assert cursor.fetchone() == (value,)
        finally:
            cursor.execute(f"SET SESSION {variable} = %s", (before,))
        assert installing.state(USING).is_current
        cursor.execute(
            "SELECT DISTINCT sql_mode, character_set_client FROM information_schema.routines "
            "WHERE routine_schema = DATABASE() AND routine_comment LIKE 'django-mysqlqueue %'"
        )
        assert cursor.fetchall() == (("STRICT_TRANS_TABLES", "utf8mb4"),)


@servers_only
def test_procedures_that_another_session_has_created_are_replaced(none_installed):
    installing.install(USING)
    (one,) = (one for one in installing.wanted(USING) if one.name == "queue__write")
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@SESSION.sql_mode")
        (before,) = cursor.fetchone()
        cursor.execute("SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'")
        cursor.execute("DROP PROCEDURE queue__write")
        cursor.execute(one.sql)
        cursor.execute("SET SESSION sql_mode = %s", (before,))
    assert installing.state(USING).different == ("queue__write",)
    installing.install(USING)
    assert installing.state(USING).is_current


@servers_only
def test_procedures_of_others_are_left_alone(none_installed):
    with connection.cursor() as cursor:
        cursor.execute("DROP PROCEDURE IF EXISTS queue_mine")
        cursor.execute("CREATE PROCEDURE queue_mine() BEGIN END")
        installing.install(USING)
        installing.remove(USING)
        cursor.execute("CALL queue_mine()")
        cursor.execute("DROP PROCEDURE queue_mine")


def test_sqlite_has_no_procedures(db):
    if connection.vendor != "sqlite":
        pytest.skip("a server has them")
    with pytest.raises(CommandError, match="The database 'default' is SQLite, which has no stored procedures"):
        call_command("queueprocedures")
    assert found() == []


@servers_only
def test_the_check_reports_old_and_missing_procedures(none_installed, settings):
    assert found() == []
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "GROUPS": {"mail": {"SQL_TOPICS": ["orders"]}}}
    assert found() == ["django_mysqlqueue.W021"]
    installing.install(USING)
    assert found() == []
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "LEASE_DURATION": 60}
    assert found() == ["django_mysqlqueue.W021"]


def test_every_placeholder_is_filled_in_and_only_known_tables_are_named(no_handlers):
    found = definitions(conf.get_settings(), [], mariadb=True)
    assert {one.name for one in found if not one.name.startswith("queue__")} == PUBLIC
    names = {one.name for one in found}
    for one in found:
        assert "{{" not in one.sql
        called = set(re.findall(r"CALL (\w+)\(", one.sql))
        assert called <= names
        assert all(name.startswith("queue__") for name in called)
        assert one.sql.startswith(f"CREATE PROCEDURE {one.name}(")
        assert "SQL SECURITY DEFINER" in one.sql
        # A commit of the procedures ends neither the connection nor begins a transaction, whatever completion_type is.
        assert not re.search(r"(COMMIT|ROLLBACK)\s*;", one.sql)


def test_options_of_the_code_are_in_the_procedures(no_handlers):
    @subscriber("orders", group="mail", max_attempts=None, visibility_timeout=7, on_failure="block")
    def handle(delivery):
        pass

    (options,) = (
        one.sql
        for one in definitions(conf.get_settings(), registry.subscriptions().values(), mariadb=False)
        if one.name == "queue__options"
    )
    assert "WHEN p_group = 'mail' AND p_topic = 'orders' THEN " in options
    assert '"max_attempts": null' in options
    assert '"visibility_timeout": 7.0' in options


# -- groups without a handler --------------------------------------------------------


GROUPS = {"mail": {"SQL_TOPICS": ["orders", "returns"], "MODE": "shared", "MAX_ATTEMPTS": 2}}


def test_migrate_registers_groups_for_clients_in_plain_sql(db, no_handlers, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "GROUPS": GROUPS}
    register_groups(USING)
    assert list(ConsumerGroup.objects.order_by("topic").values_list("consumer_group", "topic", "mode")) == [
        ("mail", "orders", "shared"),
        ("mail", "returns", "shared"),
    ]
    options = {
        one.name: one for one in inspection.list_options(group="mail", topic="orders")[GroupRef("mail", "orders")]
    }
    assert options["max_attempts"].value == 2
    operations.settings("mail", "orders", {"max_attempts": 3}, actor="tests")
    assert [one.id for one in checks.check_handlers()] == []


def test_subscribers_do_not_serve_them(db, no_handlers, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "GROUPS": GROUPS}
    assert registry.handlers() == {}
    one = registry.subscriptions()[GroupRef("mail", "orders")]
    assert (one.mode, one.max_attempts, one.where) == ("shared", 2, "MYSQLQUEUE['GROUPS']['mail']")
    with pytest.raises(SubscriberError, match="The group 'mail' is for clients in plain SQL"):
        one.function(type("Delivery", (), {"group": "mail"})())


def test_a_handler_comes_first(db, no_handlers, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "GROUPS": GROUPS}

    @subscriber("orders", group="mail", mode="shared")
    def handle(delivery):
        pass

    found = registry.subscriptions()
    assert found[GroupRef("mail", "orders")].function is handle
    assert GroupRef("mail", "returns") in found


@pytest.mark.parametrize(
    ("value", "text"),
    [("orders", "must be a list of topics"), ([7], "has 7: a name must be"), (["a b"], "has 'a b': a name must be")],
)
def test_wrong_topics_are_refused(settings, value, text):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "GROUPS": {"mail": {"SQL_TOPICS": value}}}
    (problem,) = conf.problems()
    assert text in problem.message


def test_options_that_do_not_fit_together_are_refused(no_handlers, settings):
    groups = {"mail": {"SQL_TOPICS": ["orders"], "MODE": "shared", "ON_FAILURE": "block"}}
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "GROUPS": groups}
    (error,) = checks.check_handlers()
    assert error.id == "django_mysqlqueue.E008"
    assert error.msg.startswith("MYSQLQUEUE['GROUPS']['mail']: on_failure='block'")


@servers_only
def test_their_options_count(none_installed, no_handlers, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "GROUPS": GROUPS}
    register_groups(USING)
    installing.install(USING)
    client = Client(GroupRef("mail", "orders"))
    client.run("INSERT INTO queue_outbox (topic, payload) VALUES ('orders', 'x')")
    call_command("queuesequence", verbosity=0)
    (row,) = client.claim()
    assert client.nack(row["handle"], delay=0) == "failed"
    (row,) = client.claim()
    assert client.nack(row["handle"], delay=0) == "dead_lettered"
    client.close()


@servers_only
def test_clients_keep_their_privileges_when_settings_change(none_installed, settings):
    """Servers revoke the privileges on a procedure that is dropped."""
    installing.install(USING)
    before = {one.name: one.comment for one in installing.wanted(USING) if one.name in PUBLIC}
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "LEASE_DURATION": 60, "MAX_ATTEMPTS": 7, "DLQ_SUFFIX": "_dead"}
    assert {one.name: one.comment for one in installing.wanted(USING) if one.name in PUBLIC} == before
    with connection.cursor() as cursor:
        cursor.execute("CREATE USER IF NOT EXISTS queue_client@localhost")
        try:
            for name in PUBLIC:
                cursor.execute(f"GRANT EXECUTE ON PROCEDURE {name} TO queue_client@localhost")
            assert installing.install(USING).different
            cursor.execute("SHOW GRANTS FOR queue_client@localhost")
            grants = "\n".join(text for (text,) in cursor.fetchall())
        finally:
            cursor.execute("DROP USER queue_client@localhost")
    assert all(f"`{name}`" in grants for name in PUBLIC)


def test_the_procedures_that_clients_call_only_call_another(no_handlers):
    """So their text need not change with a release."""
    for one in definitions(conf.get_settings(), [], mariadb=True):
        if one.name in PUBLIC:
            body = one.sql[one.sql.index("BEGIN") :]
            assert re.fullmatch(r"BEGIN\n  CALL queue__\w+\([^;]*\);\nEND", body), one.name


def test_no_expression_outside_a_select_reads_a_table(no_handlers):
    """InnoDB reads with shared locks there, whatever the isolation level, and waits for those of others."""
    for one in definitions(conf.get_settings(), [], mariadb=False):
        for statement in one.sql.split(";"):
            last = statement.strip().splitlines()[-1] if statement.strip() else ""
            if re.match(r"\s*(IF|SET|ELSEIF|WHILE|CALL|DECLARE (?!\w+ CURSOR)|CASE)\b", last):
                assert "SELECT" not in last, f"{one.name}: {last}"
        assert not re.search(
            r"\b(IF|SET|ELSEIF|WHILE)\b[^;]*?\bEXISTS \(\s*SELECT", re.sub(r"CURSOR FOR[^;]*;", "", one.sql)
        )


@servers_only
def test_an_installation_does_not_wait_for_long(none_installed, settings, monkeypatch, engine):
    """MySQL keeps a procedure that a transaction has called until its end."""
    installing.install(USING)
    register("shared")
    publish("t", {"n": 1})
    sequence()
    client = Client()
    (row,) = client.claim()
    client.run("START TRANSACTION")
    client.ack(row["handle"])
    monkeypatch.setattr(installing, "WAIT", 1)
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "DLQ_SUFFIX": "_dead"}
    if engine == "mysql":
        with pytest.raises(OperationalError, match="Lock wait timeout exceeded"):
            installing.install(USING)
    client.run("COMMIT")
    installing.install(USING)
    assert installing.state(USING).is_current
    assert client.claim() == []
    client.close()


def test_lines_are_as_long_as_those_of_python():
    for path in (ROOT / "django_mysqlqueue" / "procedures" / "sql").iterdir():
        long = [number for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 120]
        assert not long, path.name
