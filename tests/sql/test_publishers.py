"""What a publisher may do with its right alone, and what of that is stopped (SECURITY.md)."""

from __future__ import annotations

import json

import pytest
from django.db.utils import OperationalError

from django_mysqlqueue import InvalidMessage, operations, publish
from django_mysqlqueue.inspection import list_dead_letters
from django_mysqlqueue.models import OutboxMessage
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import relay, sequencing
from tests.support.roles import DENIED, account

pytestmark = pytest.mark.servers_only


@pytest.fixture
def sql(db):
    with account("publisher") as own:

        def run(statement, *parameters):
            with own.cursor() as cursor:
                cursor.execute(statement, parameters)

        yield run


def handled(topic="t"):
    """What a group on a topic gets."""
    got = []
    Sub(handler(topic, function=lambda delivery: got.append(delivery.payload))).settle()
    return got


# -- stopped ----------------------------------------------------------------------


@pytest.mark.promise("Roles")
def test_it_cannot_make_dead_letters(sql):
    """A message on a DLQ topic without the columns of a dead letter is none: nobody sees or redrives it as one."""
    with pytest.raises(InvalidMessage, match="reserved for dead letters"):
        publish("t_dlq", 1)
    sql("INSERT INTO queue_outbox (topic, payload) VALUES ('t_dlq', '1')")
    sequence()
    assert list_dead_letters(topic="t").dead_letters == ()
    assert operations.redrive("t", actor="ada", dry_run=True).planned == 0


@pytest.mark.promise("Roles")
@pytest.mark.parametrize(
    "statement",
    [
        "SELECT payload FROM queue_outbox",
        "SELECT payload FROM queue_messages",
        "DELETE FROM queue_outbox",
        "UPDATE queue_outbox SET deliver_at = 1",
        "INSERT INTO queue_messages (topic, payload, id, created_at, published_at) VALUES ('t', '1', 'i', 1, 1)",
        "INSERT INTO queue_outbox (topic, payload, target_group) VALUES ('t', '1', 'g')",
        "INSERT INTO queue_outbox (topic, payload, created_at) VALUES ('t', '1', 1)",
        "INSERT INTO queue_outbox (outbox_id, topic, payload) VALUES (1, 't', '1')",
        "UPDATE queue_consumer_groups SET paused = 1",
    ],
)
def test_it_can_neither_read_nor_change_nor_choose_who_gets_a_message(sql, statement):
    with pytest.raises(OperationalError) as refusal:
        sql(statement)
    assert refusal.value.args[0] in DENIED


@pytest.mark.promise("Roles")
def test_metadata_must_be_json(sql):
    with pytest.raises(Exception, match=r"(?i)json|constraint"):
        sql("INSERT INTO queue_outbox (topic, payload, metadata) VALUES ('t', '1', '{')")


# -- not stopped --------------------------------------------------------------------


def test_a_flood_delays_other_topics_only_on_their_way_into_the_log(sql):
    rows = ", ".join(["('flood', '1')"] * 5000)
    sql(f"INSERT INTO queue_outbox (topic, payload) VALUES {rows}")
    publish("t", "behind it")
    passes = 0
    while sequencing.sequence(USING).moved:
        passes += 1
    assert passes <= 5
    assert handled() == ["behind it"], "though nothing of the flood is handled"


def test_plain_sql_may_store_larger_payloads_than_the_setting(sql, settings):
    settings.MYSQLQUEUE = {"MAX_PAYLOAD_BYTES": 1000}
    with pytest.raises(InvalidMessage, match="payload"):
        publish("t", "x" * 2000)
    sql("INSERT INTO queue_outbox (topic, payload) VALUES ('t', %s)", json.dumps("x" * 2_000_000))
    assert [len(one) for one in handled()] == [2_000_000]


def test_it_may_publish_to_every_topic_with_every_key(sql):
    sql("INSERT INTO queue_outbox (topic, partition_key, payload) VALUES ('t', 'somebody else', '1')")
    assert handled() == [1]


def test_it_may_publish_to_topics_in_other_databases(sql, queue_db):
    sql("INSERT INTO queue_outbox (topic, payload) VALUES ('t@queue', '1')")
    sequence()
    assert relay(USING, "queue").messages == 1
    assert OutboxMessage.objects.using("queue").get().topic == "t"


@pytest.mark.promise("Roles")
def test_an_id_that_can_be_guessed_can_be_taken_first(sql):
    sql("INSERT INTO queue_outbox (topic, partition_key, id, payload) VALUES ('t', 'k', 'order-1', '\"forged\"')")
    publish("t", "true", key="k", id="order-1")
    assert handled() == ["forged"]


def test_a_coalesce_key_that_can_be_guessed_supersedes_the_messages_of_others(sql):
    publish("t", "true", key="k", coalesce="c")
    sql(
        "INSERT INTO queue_outbox (topic, partition_key, payload, coalesce_key) VALUES ('t', 'k', '\"forged\"', %s)",
        OutboxMessage.objects.get().coalesce_key,
    )
    assert handled() == ["forged"]
