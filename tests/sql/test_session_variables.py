"""How a session is set: what the queue sets right for itself, and what it refuses of the project's."""

from __future__ import annotations

import time

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import publish, publish_many
from django_mysqlqueue.checks import system as checks
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from pyspark_mysqlqueue.databases import Place
from tests.support.harness import USING, Sub, handler, in_thread, sequence
from tests.support.internals import GroupRef, dialect_of, drop_connection, groups, sessions
from tests.support.server_sessions import processlist

BAD = "completion_type = 2, sql_select_limit = 2, sql_safe_updates = 1, sql_big_selects = 0, timestamp = 1000000000"
BAD_NAMES = {"completion_type", "sql_select_limit", "sql_safe_updates", "sql_big_selects", "timestamp"}


@pytest.fixture
def bad(db, engine):
    """What a session can be set to that is bad, all at once: (the statement, the names)."""
    mode = ", sql_mode = CONCAT(@@sql_mode, ',EMPTY_STRING_IS_NULL')" if engine == "mariadb" else ""
    return f"SET {BAD}{mode}", BAD_NAMES | ({"sql_mode"} if mode else set())


@pytest.fixture
def own_session(db):
    """What the test does to its session ends with it."""
    yield
    connection.close()


def execute(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)


def faults():
    return {one.name for one, _ in dialect_of(connection).session_faults(connection)}


def lose_autocommit():
    """As on MySQL with a global autocommit=0: the server has it off, and Django takes it to be on."""
    execute("SET autocommit = 0")
    assert connection.get_autocommit()


# -- what the queue sets right ------------------------------------------------


@pytest.mark.promise("Server settings")
@pytest.mark.servers_only
@pytest.mark.parametrize("watch", [True, False])
def test_a_subscribers_sessions_are_set_right(bad, watch):
    """Each of them, a second one too, by the one statement that carries the time-outs."""
    statement, names = bad

    def look():
        wrapper = connections[USING]
        settings = wrapper.settings_dict
        wrapper.settings_dict = {**settings, "OPTIONS": {**settings["OPTIONS"], "init_command": statement}}
        before = opened(wrapper)
        sessions.adopt(USING, sessions.Timeouts(idle=7, lock_wait=3, network=5, read=9), watch=watch)
        return before, opened(wrapper), opened(wrapper)

    def opened(wrapper):
        wrapper.ensure_connection()
        with wrapper.cursor() as cursor:
            cursor.execute("SHOW SESSION STATUS LIKE 'Com_set_option'")
            ((_, sets),) = cursor.fetchall()
        wrong = faults()
        wrapper.close()
        return int(sets), wrong

    (sets, wrong), *adopted = in_thread(look)
    assert wrong == names
    assert adopted == [(sets + 1, set())] * 2


@pytest.mark.servers_only
def test_receivers_of_the_project_come_before(bad):
    """A project that sets up its sessions by ``connection_created`` does not undo it."""
    from django.db.backends.signals import connection_created

    def set_up(*, connection, **kwargs):
        if connection.alias == USING:
            with connection.cursor() as cursor:
                cursor.execute(f"{bad[0]}, autocommit = 0")

    def look():
        connection_created.disconnect(dispatch_uid="django_mysqlqueue.runtime.sessions")
        connection_created.connect(set_up)
        wrapper = connections[USING]
        try:
            sessions.adopt(USING, sessions.Timeouts(idle=7, lock_wait=3, network=5, read=9))
            found = faults()
            publish("t", 1)
            wrapper.connection.close()  # what is not committed is gone with it
            return found
        finally:
            connection_created.disconnect(set_up)
            drop_connection(wrapper)

    assert in_thread(look) == set()
    assert OutboxMessage.objects.count() == 1


@pytest.mark.promise("Server settings")
@pytest.mark.servers_only
def test_gc_sees_every_group_whatever_the_session_returns(db, settings, own_session):
    """With one row of each SELECT it took the log from the groups that it did not see."""
    settings.MYSQLQUEUE = {"RETENTION": 0}
    for name in ("g0", "g1", "g2"):
        groups.register(USING, GroupRef(name, "t"), mode="ordered", start="earliest")
    publish_many("t", range(5))
    sequence()
    done = Sub(handler(group="g0"))
    done.settle()
    done.leave()
    execute("SET sql_select_limit = 1")
    call_command("queuegc")
    assert QueueMessage.objects.count() == 5


@pytest.mark.servers_only
def test_a_command_gives_the_projects_connection_back(bad, own_session):
    """One that had to be set right is closed: the next statement has what the project has set up."""
    statement, names = bad
    connection.ensure_connection()
    sound = connection.connection
    with sessions.sound(USING):
        pass
    assert connection.connection is sound
    execute(statement)
    assert faults() == names
    with sessions.sound(USING):
        assert faults() == set()
    assert connection.connection is None
    assert faults() == set()


@pytest.mark.servers_only
def test_a_command_that_connects_anew_has_a_sound_session_again(bad, own_session, monkeypatch):
    statement, names = bad
    options = connection.settings_dict["OPTIONS"]
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", {**options, "init_command": statement})
    connection.close()
    assert faults() == names
    connection.close()
    with sessions.sound(USING):
        assert faults() == set()
        connection.close()
        assert faults() == set()
    connection.close()
    assert faults() == names


@pytest.mark.servers_only
def test_a_command_replaces_a_connection_that_the_server_has_ended(db, own_session):
    connection.ensure_connection()
    identity = connection.connection.thread_id()
    in_thread(lambda: execute(f"KILL CONNECTION {identity}"))
    call_command("queuesequence")
    with sessions.sound(USING):
        assert faults() == set()


def test_a_command_inside_a_transaction_changes_nothing(db):
    with transaction.atomic():
        publish("t", 1)
        with sessions.sound(USING):
            publish("t", 2)
        transaction.set_rollback(True)
    assert not OutboxMessage.objects.exists()


@pytest.mark.servers_only
def test_the_pipelines_sessions_are_set_right(bad, tmp_path):
    """They are not Django's; a part of the partitions or groups would be a part of the archive."""
    statement, _ = bad
    details = connection.get_connection_params()
    lines = {
        "user": details["user"],
        "database": details["database"],
        "socket": details["unix_socket"],
        "init-command": statement,
    }
    file = tmp_path / "my.cnf"
    file.write_text("[client]\n" + "".join(f'{name} = "{value}"\n' for name, value in lines.items()))
    with Place(defaults_file=str(file)).connect() as database:
        wrong = ", ".join(one.wrong for one in dialect_of(connection).session)
        assert database.row(f"SELECT {wrong}, @@sql_mode LIKE '%%STRICT_ALL_TABLES%%'", ()) == (
            *(0 for _ in dialect_of(connection).session),
            1,
        )


# -- what it refuses ----------------------------------------------------------


@pytest.mark.promise("Server settings")
@pytest.mark.servers_only
@pytest.mark.parametrize("number", [1, 3])
def test_a_publish_that_nobody_would_commit_is_refused(db, own_session, number):
    """An id came back for a row that was gone with its connection."""
    lose_autocommit()
    with pytest.raises(ImproperlyConfigured, match="check --database default"):
        publish_many("t", range(number)) if number > 1 else publish("t", 1)
    execute("COMMIT")
    assert not OutboxMessage.objects.exists()


@pytest.mark.servers_only
def test_the_first_publish_of_a_connection_asks_for_autocommit(db, own_session):
    """Those behind it ask nothing, until something has changed or there is another connection."""

    def asks(*messages):
        with CaptureQueriesContext(connection) as captured:
            publish_many("t", messages)
        return "@@autocommit" in captured.captured_queries[-1]["sql"]

    connection.close()
    assert [asks(1), asks(2), asks(3, 4)] == [True, False, False]
    connection.close()
    connection.ensure_connection()
    with transaction.atomic():
        publish("t", 5)  # says nothing of it
    assert [asks(6), asks(7)] == [True, False]
    lose_autocommit()
    with pytest.raises(ImproperlyConfigured):
        publish("t", 8)
    execute("SET autocommit = 1")
    assert not asks(9)
    assert OutboxMessage.objects.count() == 8


def kill(session):
    """End a session, and wait for its end: MySQL's thread may otherwise take the next connection while it is ending."""
    execute(f"KILL CONNECTION {session}")
    deadline = time.monotonic() + 20
    with connection.cursor() as cursor:
        while cursor.execute(f"SELECT 1 FROM {processlist()} WHERE id = %s", [session]):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.servers_only
def test_a_publish_asks_the_connection_that_a_health_check_has_opened(db, own_session):
    """CONN_HEALTH_CHECKS: the connection that was there is replaced by the statement itself."""
    publish("t", 1)
    connection.health_check_enabled, connection.health_check_done = True, False  # as at the beginning of a request
    identity = connection.connection.thread_id()
    in_thread(lambda: kill(identity))
    with CaptureQueriesContext(connection) as captured:
        publish("t", 2)
    assert connection.connection.thread_id() != identity
    assert "@@autocommit" in captured.captured_queries[-1]["sql"]


@pytest.mark.servers_only
def test_a_refused_publish_is_refused_in_every_mode(db, own_session):
    """Not strict: a NULL would be stored as an empty text."""
    lose_autocommit()
    execute("SET sql_mode = ''")
    with pytest.raises(ImproperlyConfigured):
        publish_many("t", range(3))
    with pytest.raises(ImproperlyConfigured):
        publish("t", 1, delay=60)
    execute("COMMIT")
    assert not OutboxMessage.objects.exists()


@pytest.mark.servers_only
def test_a_publish_inside_a_transaction_needs_no_autocommit(db, own_session):
    """Django turns it off by itself, and on again behind it."""
    lose_autocommit()
    with transaction.atomic():
        publish("t", 1)
        publish_many("t", [2, 3])
    publish("t", 4)
    connection.close()
    assert sorted(OutboxMessage.objects.values_list("payload", flat=True)) == [b"1", b"2", b"3", b"4"]


@pytest.mark.servers_only
def test_a_project_without_autocommit_publishes_as_ever(db, own_session):
    transaction.set_autocommit(False)
    try:
        publish("t", 1)
        assert faults() == set()
        transaction.commit()
    finally:
        transaction.set_autocommit(True)
    assert OutboxMessage.objects.count() == 1


def test_sound_sessions_pass_the_check(db):
    assert checks.check_sessions(databases=[USING]) == []


@pytest.mark.servers_only
def test_the_check_names_each_variable_its_effect_and_the_remedy(bad, own_session):
    statement, names = bad
    execute(statement)
    lose_autocommit()
    errors = {error.msg.split(" have ")[1].split(" = ")[0]: error for error in checks.check_sessions(databases=[USING])}
    assert errors.keys() == names | {"autocommit"}
    assert {error.id for error in errors.values()} == {"django_mysqlqueue.E017"}
    assert "sql_select_limit = 2: every SELECT without a LIMIT" in errors["sql_select_limit"].msg
    for one in dialect_of(connection).session:
        if one.name in errors:
            assert one.effect in errors[one.name].msg
            assert f"DATABASES['default']['OPTIONS']['init_command'] = \"SET {one.name} = " in errors[one.name].hint
            execute(errors[one.name].hint.split('"')[1])
    assert checks.check_sessions(databases=[USING]) == []


@pytest.mark.servers_only
def test_the_check_of_the_server_sees_all_whatever_the_session_returns(db, own_session, monkeypatch):
    """With one row of each SELECT it knew one of its variables and one of its tables; without large joins none."""
    execute("ALTER TABLE queue_sequencer ENGINE=MyISAM")
    try:
        execute("SET sql_select_limit = 1, max_join_size = 1, sql_big_selects = 0")
        (error,) = checks.check_database(databases=[USING])
    finally:
        execute("ALTER TABLE queue_sequencer ENGINE=InnoDB")
    assert error.id == "django_mysqlqueue.E011"
    assert "queue_sequencer" in error.msg
    monkeypatch.setitem(
        connection.settings_dict,
        "OPTIONS",
        {**connection.settings_dict["OPTIONS"], "init_command": "SET sql_select_limit = 1"},
    )
    connection.close()
    assert checks.check_database(databases=[USING]) == []
    # It has mended a connection, and has left none behind that is.
    assert [error.id for error in checks.check_sessions(databases=[USING])] == ["django_mysqlqueue.E017"]


@pytest.mark.servers_only
def test_the_check_speaks_of_the_queues_database_only(bad, own_session):
    execute(bad[0])
    assert checks.check_sessions(databases=["other"]) == []
    assert checks.check_sessions() == []
