"""A statement has one name on all engines, whatever it is sent with."""

from __future__ import annotations

import pytest

from django_mysqlqueue.sql.sqlite import DIALECT as SQLITE
from tests.support.internals import DIALECT as MYSQL
from tests.support.statement_names import name_of, without_lock

STATE = "queue_delivery_state"
BY_ROW = "s.consumer_group = %s AND s.topic = %s AND s.message_offset = v.o"


def lock(dialect, count=1, more=""):
    join = dialect.join_to(STATE, "s")
    return f"SELECT s.acked{more} FROM {dialect.rows(('o',), count)} {join} ON {BY_ROW}{dialect.for_update}"


def update(dialect):
    return dialect.update_joined(STATE, ("o",), 2, BY_ROW, {"acked": "1", "retry_count": "v.o"}, "s.delivery_token = 0")


def delete(dialect):
    return dialect.delete_joined(STATE, ("o",), 2, BY_ROW)


def upsert(dialect):
    stored = dialect.on_conflict(("target",), {"read_offset": "0"})
    return f"INSERT INTO queue_relay_watermarks (target, read_offset) VALUES (%s, %s){stored}"


def several(dialect):
    log = f"queue_messages{dialect.force_index('PRIMARY')}"
    one = f"SELECT `offset` FROM {log} WHERE topic = %s ORDER BY `offset` LIMIT 5"
    return dialect.union(*[one] * 3)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lock, "lock:delivery_state by consumer_group, topic, message_offset"),
        (update, "update:delivery_state by consumer_group, topic, message_offset, delivery_token"),
        (delete, "delete:delivery_state by consumer_group, topic, message_offset"),
        (upsert, "insert:relay_watermarks"),
        (several, "select:messages by topic order offset"),
    ],
)
def test_the_engines_ways_to_write_it_are_no_part_of_a_name(make, name):
    assert name_of(make(MYSQL)) == name
    assert name_of(make(SQLITE)) == without_lock(name)


def test_lists_and_what_is_selected_are_no_part_of_a_name():
    assert name_of(lock(MYSQL)) == name_of(lock(MYSQL, count=7, more=", s.retry_count, s.last_error"))


@pytest.mark.parametrize(
    ("sql", "name"),
    [
        ("SELECT 1 FROM queue_outbox WHERE id = 'topic'", "select:outbox by id"),
        ("SELECT MAX(o.topic) FROM queue_outbox o", "select:outbox"),
        ("SELECT COUNT(*) FROM queue_outbox o LOCK IN SHARE MODE", "share:outbox"),
        ("SELECT COUNT(*) FROM (SELECT 1 FROM queue_outbox WHERE topic = %s LIMIT 5) o", "count:outbox by topic"),
        (
            "SELECT EXISTS (SELECT 1 FROM queue_outbox WHERE topic = %s) FROM queue_messages",
            "select:outbox+messages by topic",
        ),
        ('SELECT "queue_outbox"."id" FROM "queue_outbox" ORDER BY 1 ASC', "select:outbox order"),
        ("SELECT x.id FROM auth_user x", ""),
        ("BEGIN IMMEDIATE", ""),
    ],
)
def test_name(sql, name):
    assert name_of(sql) == name
