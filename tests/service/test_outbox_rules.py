"""What the outbox accepts: an INSERT of plain SQL that breaks a rule fails, in sessions that are not strict, too."""

from __future__ import annotations

import pytest
from django.db import Error, connection

from django_mysqlqueue.db.sizes import LATEST_DELIVERY

pytestmark = pytest.mark.usefixtures("db")

LONG = "x" * 250
REFUSED = [
    ("topic", "''", "topic_of_1_to_120_characters"),
    ("topic", f"'{'t' * 121}'", "topic_of_1_to_120_characters"),
    ("topic", f"'{LONG}'", "topic_of_1_to_120_characters"),
    ("id", "''", "id_of_1_to_190_characters"),
    ("id", f"'{LONG}'", "id_of_1_to_190_characters"),
    ("partition_key", f"'{'é' * 191}'", "partition_key_of_0_to_190_characters"),
    ("partition_key", f"'__p:+010:{LONG}'", "partition_key_of_0_to_190_characters"),
    ("publisher_key", f"'{LONG}'", "publisher_key_of_0_to_190_characters"),
    ("coalesce_key", "''", "coalesce_key_of_1_to_190_characters"),
    ("coalesce_key", f"'{LONG}'", "coalesce_key_of_1_to_190_characters"),
    ("target_group", f"'{LONG}'", "target_group_of_0_to_100_characters"),
    ("partition_key", "'__p:+000:a'", "partition_key_no_malformed_lane"),
    ("partition_key", "'__p:+101:a'", "partition_key_no_malformed_lane"),
    ("partition_key", "'__p:-101:a'", "partition_key_no_malformed_lane"),
    ("partition_key", "'__p:+10:a'", "partition_key_no_malformed_lane"),
    ("partition_key", "'__p:+0a0:a'", "partition_key_no_malformed_lane"),
    ("partition_key", "'__p:-'", "partition_key_no_malformed_lane"),
    ("metadata", "'[]'", "metadata_is_an_object"),
    ("metadata", "'null'", "metadata_is_an_object"),
    ("metadata", "'\"a\"'", "metadata_is_an_object"),
    ("deliver_at", "-1", "deliver_at_from_0_to_year_9999"),
    ("deliver_at", f"{LATEST_DELIVERY + 1}", "deliver_at_from_0_to_year_9999"),
    ("created_at", "-1", "created_at_from_0_to_year_9999"),
    ("created_at", "9223372036854775808", "created_at_from_0_to_year_9999"),
    ("failed_at", "-1", "failed_at_from_0_to_year_9999"),
    ("failed_at", f"{LATEST_DELIVERY + 1}", "failed_at_from_0_to_year_9999"),
    ("expires_at", "0", "expires_at_from_1_to_year_9999"),
    ("expires_at", f"{LATEST_DELIVERY + 1}", "expires_at_from_1_to_year_9999"),
]
ACCEPTED = [
    ("topic", f"'{'t' * 120}'"),
    ("id", f"'{'é' * 190}'"),
    ("partition_key", f"'{'é' * 190}'"),
    ("partition_key", "'__p:+100:'"),
    ("partition_key", f"'__p:-001:{'é' * 181}'"),
    ("partition_key", "'__p:7'"),
    ("partition_key", "'__P:+'"),
    ("publisher_key", "''"),
    ("publisher_key", "NULL"),
    ("coalesce_key", "NULL"),
    ("target_group", f"'{'g' * 100}'"),
    ("metadata", "' { } '"),
    ("deliver_at", f"{LATEST_DELIVERY}"),
    ("expires_at", "1"),
    ("expires_at", "NULL"),
]


@pytest.fixture(params=["strict", "not strict"])
def cursor(db, request):
    with connection.cursor() as cursor:
        if connection.vendor == "mysql" and request.param == "not strict":
            cursor.execute("SET SESSION sql_mode = ''")
        yield cursor
    connection.close()


def insert(cursor, column, value):
    columns = {"topic": "'t'", "payload": "'p'", column: value}
    cursor.execute(f"INSERT INTO queue_outbox ({', '.join(columns)}) VALUES ({', '.join(columns.values())})")


@pytest.mark.parametrize(("column", "value", "rule"), REFUSED)
def test_a_row_that_breaks_a_rule_is_refused(cursor, column, value, rule):
    with pytest.raises(Error) as error:
        insert(cursor, column, value)
    cursor.execute("SELECT COUNT(*) FROM queue_outbox")
    assert cursor.fetchone() == (0,)
    # A strict session refuses some values itself, before it checks the rules.
    assert any(text in str(error.value) for text in (f"queue_outbox_{rule}", "Data too long", "Out of range"))


@pytest.mark.parametrize(("column", "value"), ACCEPTED)
def test_a_row_that_keeps_the_rules_is_stored_as_it_is(cursor, column, value):
    insert(cursor, column, value)
    cursor.execute(f"SELECT COUNT(*) FROM queue_outbox WHERE {column} = {value} OR {column} IS NULL")
    if column != "metadata":
        assert cursor.fetchone() == (1,)
