"""Debouncing: of the messages with a delay and one coalesce key, only the latest enters the log."""

from __future__ import annotations

import datetime
import itertools
import json

import pytest
from django.core.management import call_command
from django.db import connection, transaction

from django_mysqlqueue import InvalidMessage, Message, cancel, publish, publish_many, reschedule, subscriber
from django_mysqlqueue.inspection import get_overview, list_scheduled, scheduled
from django_mysqlqueue.models import DebouncedMessage, OutboxMessage, QueueMessage, Sequencer
from django_mysqlqueue.testing import _advance, deliver_all
from tests.support.documents import DOCS, blocks
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import debouncing, sequencing

pytestmark = pytest.mark.promise("Debouncing")


def debounced(payload, *, coalesce="c", delay=30, **options):
    return publish("t", payload, key="k", coalesce=coalesce, delay=delay, **options)


def advance(seconds):
    _advance(USING, int(seconds * 1000))


def pass_time(seconds, step=1):
    """Sequences what comes due within a time, second by second."""
    for _ in range(0, seconds, step):
        advance(step)
        sequence()


def in_log():
    return [row.message_id for row in QueueMessage.objects.order_by("offset")]


def waiting():
    return sorted(row.message_id for row in OutboxMessage.objects.all())


def count_replaced():
    return Sequencer.objects.get().debounced


# -- the latest -----------------------------------------------------------------


def test_each_new_one_starts_the_wait_again(db):
    debounced(1, id="1")
    pass_time(20)
    debounced(2, id="2")
    pass_time(20)  # The first came due after 30 seconds.
    assert (in_log(), waiting()) == ([], ["2"])
    debounced(3, id="3")
    pass_time(20)
    assert (in_log(), waiting()) == ([], ["3"])
    pass_time(11)
    assert (in_log(), waiting()) == (["3"], [])
    assert count_replaced() == 2
    assert not DebouncedMessage.objects.exists()


def test_without_another_one_it_is_delivered_after_its_delay(db):
    debounced(1, id="1")
    row = OutboxMessage.objects.get()
    assert row.deliver_at - row.created_at == 30_000
    pass_time(20)
    assert in_log() == []
    pass_time(11)
    assert (in_log(), count_replaced()) == (["1"], 0)


def test_a_message_after_the_wait_starts_another(db):
    debounced(1, id="1")
    pass_time(31)
    debounced(2, id="2")
    pass_time(31)
    assert (in_log(), count_replaced()) == (["1", "2"], 0)


def test_keys_count_within_a_topic_a_partition_and_a_priority(db):
    publish("t", 1, id="1", key="a", coalesce="c", delay=1)
    publish("t", 2, id="2", key="b", coalesce="c", delay=1)
    publish("t", 3, id="3", key="a", coalesce="c", delay=1, priority=5)
    publish("t", 4, id="4", key="a", coalesce="d", delay=1)
    publish("u", 5, id="5", key="a", coalesce="c", delay=1)
    pass_time(2)
    assert sorted(in_log()) == ["1", "2", "3", "4", "5"]


def test_the_latest_is_the_last_one_published_not_the_last_to_come_due(db):
    debounced(1, id="1", delay=60)
    debounced(2, id="2", delay=10)
    pass_time(11)
    assert (in_log(), waiting()) == (["2"], [])
    assert count_replaced() == 1


@pytest.mark.parametrize("single", [True, False])
def test_many_at_once_leave_one_for_each_key(db, single):
    messages = [Message(n, id=f"{n}", key="k", coalesce=f"c{n % 3}", delay=5) for n in range(1200)]
    if single:
        for message in messages[:60]:
            debounced(message.payload, id=message.id, coalesce=message.coalesce, delay=5)
    else:
        publish_many("t", messages)
    number = 60 if single else 1200
    pass_time(6)
    assert sorted(in_log()) == sorted(f"{n}" for n in range(number - 3, number))
    assert count_replaced() == number - 3
    assert not OutboxMessage.objects.exists()
    assert not DebouncedMessage.objects.exists()


def test_among_others_only_debounced_messages_are_remembered(db):
    publish_many(
        "t",
        [
            Message(0, id="0", coalesce="c"),
            Message(1, id="1", coalesce="c", delay=5),
            Message(2, id="2", delay=5),
            Message(3, id="3", coalesce="c", delay=5),
            Message(4, id="4"),
        ],
    )
    rows = {row.outbox_id: row.message_id for row in OutboxMessage.objects.all()}
    assert {row.outbox_id: row.message_id for row in DebouncedMessage.objects.all()} == {
        outbox_id: name for outbox_id, name in rows.items() if name in "13"
    }
    pass_time(6)
    assert sorted(in_log()) == ["0", "2", "3", "4"]


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_groups_handle_what_is_left(db, mode):
    got = []
    sub = Sub(handler(function=lambda delivery: got.append(delivery.payload), mode=mode))
    for n in range(5):
        debounced(n)
    sub.settle()
    assert got == []
    advance(31)
    sub.settle()
    assert got == [4]


def test_in_the_log_it_coalesces_with_those_without_a_delay(db):
    got = []
    sub = Sub(handler(function=lambda delivery: got.append(delivery.payload)))
    debounced(1, delay=5)
    advance(6)
    sequence()
    publish("t", 2, key="k", coalesce="c")
    sub.settle()
    assert got == [2]


# -- the maximum ------------------------------------------------------------------


def test_the_maximum_delay_bounds_the_wait(db):
    for n in range(10):
        debounced(n, id=f"{n}", delay=30, max_delay=60)
        pass_time(20)
        if n < 3:
            assert (in_log(), n) == ([], n) if n < 2 else (["2"], n)
    # The first wait began at 0 and ended at 60, when 2 was the latest. The next began with 3.
    assert in_log() == ["2", "5", "8"]


def test_each_message_enters_within_its_maximum(db):
    debounced(1, id="1", delay=10, max_delay=15)
    pass_time(5)
    debounced(2, id="2", delay=100)
    pass_time(9)
    assert in_log() == []
    pass_time(2)
    assert (in_log(), waiting()) == (["2"], [])


def test_the_maximum_passes_on_through_many(db):
    """Also if each of them has replaced the one before it."""
    debounced(0, id="0", delay=2, max_delay=9)
    for n in range(1, 30):
        pass_time(1)
        debounced(n, id=f"{n}", delay=2)
        assert len(waiting()) <= 3
    assert in_log()[0] == "8"


# -- ids, cancels, reschedules ---------------------------------------------------


def test_the_id_of_one_that_was_replaced_is_free_again(db):
    debounced(1, id="a", delay=5)
    debounced(2, id="b", delay=5)
    pass_time(6)
    publish("t", 3, key="k", id="a")
    sequence()
    assert in_log() == ["b", "a"]


def test_a_duplicate_replaces_nothing(db):
    publish("t", 1, key="k", id="a")
    sequence()
    debounced(2, id="b", delay=5)
    debounced(1, id="a", delay=5)
    pass_time(6)
    assert (in_log(), waiting()) == (["a", "b"], [])
    assert not DebouncedMessage.objects.exists()
    assert count_replaced() == 0


def test_a_cancelled_message_replaces_nothing(db):
    debounced(1, id="1", delay=5)
    debounced(2, id="2", delay=10)
    assert cancel("2", topic="t") == 1
    assert DebouncedMessage.objects.count() == 1
    pass_time(11)
    assert in_log() == ["1"]


def test_a_rescheduled_message_is_no_longer_debounced(db):
    debounced(1, id="1", delay=5)
    debounced(2, id="2", delay=5)
    reschedule("1", topic="t", delay=20)
    pass_time(6)
    assert in_log() == ["2"]
    pass_time(15)
    assert in_log() == ["2", "1"]


def test_forgetting_locks_nothing_of_others(db):
    """A reschedule of a message that is not debounced sends no DELETE."""
    publish("t", 1, id="1", delay=5)
    with connection.execute_wrapper(_refuse_delete):
        reschedule("1", topic="t", delay=6)


def _refuse_delete(execute, sql, params, many, context):
    assert not sql.startswith("DELETE"), sql
    return execute(sql, params, many, context)


# -- in a transaction -------------------------------------------------------------


def test_both_rows_commit_together(db):
    debounced(1, id="1")
    with transaction.atomic():
        debounced(2, id="2")
        transaction.set_rollback(True)
    assert waiting() == ["1"]
    assert DebouncedMessage.objects.get().message_id == "1"


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("many", [True, False])
def test_a_failure_stores_nothing(db, inside, many):
    def fail(execute, sql, params, is_many, context):
        if sql.startswith("INSERT INTO queue_debounced"):
            raise OSError("broken")
        return execute(sql, params, is_many, context)

    def send():
        if many:
            publish_many("t", [Message(n, coalesce="c", delay=5) for n in range(5)])
        else:
            debounced(1)

    def attempt():
        with pytest.raises(OSError, match="broken"), connection.execute_wrapper(fail):
            send()

    if inside:
        with transaction.atomic():
            attempt()
            publish("t", 2, id="2")
    else:
        attempt()
    assert waiting() == (["2"] if inside else [])


# -- what costs nothing -----------------------------------------------------------


@pytest.mark.parametrize("options", [{"coalesce": "c"}, {"delay": 5}, {"coalesce": "c", "delay": 0}])
def test_others_are_not_debounced(db, options, django_assert_num_queries):
    with django_assert_num_queries(1):
        publish("t", 1, key="k", **options)
    assert not DebouncedMessage.objects.exists()


def test_a_fixed_time_is_not_debounced(db):
    """Both are delivered at their times, and coalesce in the log."""
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=60)
    publish("t", 1, id="1", key="k", coalesce="c", deliver_at=later)
    publish("t", 2, id="2", key="k", coalesce="c", deliver_at=later)
    pass_time(62, 62)
    assert in_log() == ["1", "2"]


# -- limits of a pass -------------------------------------------------------------


@pytest.mark.parametrize("limit", [2, 3, 7])
def test_more_messages_than_one_statement_reads(db, limit, monkeypatch):
    monkeypatch.setattr(debouncing, "PENDING", limit)
    for n in range(12):
        debounced(n, id=f"{n}", coalesce=f"c{n % 3}", delay=5, max_delay=8)
    advance(6)
    passes = _sequence_all()
    assert sorted(in_log()) == ["10", "11", "9"]
    assert waiting() == []
    assert passes < 60


@pytest.mark.parametrize("limit", [2, 3, 7])
def test_the_bound_of_the_oldest_counts_with_many(db, limit, monkeypatch):
    monkeypatch.setattr(debouncing, "PENDING", limit)
    debounced("first", id="first", delay=5, max_delay=5)
    for n in range(10):
        debounced(n, id=f"{n}", delay=20)
    advance(6)
    _sequence_all()
    assert (in_log(), waiting()) == (["9"], [])


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_few_rows_in_a_pass(db, rows):
    for n in range(20):
        debounced(n, id=f"{n}", coalesce=f"c{n % 4}", delay=5)
        publish("t", n, id=f"plain{n}", delay=5)
        publish("t", n, id=f"now{n}")
    advance(6)
    _sequence_all(max_rows=rows)
    assert len(in_log()) == 44
    assert {f"{n}" for n in range(16, 20)} < set(in_log())


def _sequence_all(**limits):
    for number in itertools.count(1):
        if not sequencing.sequence(USING, **limits).more:
            return number
        assert number < 200
    raise AssertionError


# -- rows that do not fit ---------------------------------------------------------


def test_a_row_without_its_message_replaces_nothing(db):
    """Plain SQL has cancelled the message, and left the row."""
    debounced(1, id="1", delay=5)
    debounced(2, id="2", delay=5)
    OutboxMessage.objects.filter(message_id="2").delete()
    pass_time(6)
    assert in_log() == ["1"]


@pytest.mark.parametrize("column", ["topic", "partition_key", "message_id"])
def test_a_row_of_another_message_replaces_nothing(db, column):
    """The outbox was emptied, and its ids begin again."""
    debounced(1, id="1", delay=5)
    debounced(2, id="2", delay=9)
    OutboxMessage.objects.filter(message_id="2").update(**{column: "other"})
    pass_time(6)
    assert in_log() == ["1"]
    pass_time(6)
    assert len(in_log()) == 2


def test_gc_deletes_rows_without_messages(db):
    for n in range(5):
        debounced(n, id=f"{n}")
    OutboxMessage.objects.filter(message_id__in=["1", "3"]).delete()
    deleted, after = 0, 0
    while after is not None:
        number, after = debouncing.collect(USING, after=after, limit=2)
        deleted += number
    assert deleted == 2
    assert sorted(row.message_id for row in DebouncedMessage.objects.all()) == ["0", "2", "4"]
    assert debouncing.collect(USING) == (0, None)


# -- wrong values -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"max_delay": 5}, "max_delay 5: needs coalesce, and a delay of at least a millisecond"),
        ({"max_delay": 5, "coalesce": "c"}, "needs coalesce, and a delay"),
        ({"max_delay": 5, "delay": 1}, "needs coalesce, and a delay"),
        ({"max_delay": 5, "delay": 0, "coalesce": "c"}, "needs coalesce, and a delay"),
        ({"max_delay": 5, "delay": 6, "coalesce": "c"}, "max_delay 5: must be at least the delay 6"),
        ({"max_delay": -1, "delay": 6, "coalesce": "c"}, "max_delay -1: must be a timedelta or seconds"),
        ({"max_delay": "x", "delay": 6, "coalesce": "c"}, "max_delay 'x': must be a timedelta or seconds"),
        (
            {
                "max_delay": 5,
                "coalesce": "c",
                "deliver_at": datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC),
            },
            "needs coalesce, and a delay",
        ),
    ],
)
def test_wrong_values_are_refused(db, options, rule):
    with pytest.raises(InvalidMessage, match=rule):
        publish("t", 1, **options)
    with pytest.raises(InvalidMessage, match=f"message 1: .*{rule}"):
        publish_many("t", [Message(0), Message(1, **options)])
    assert not OutboxMessage.objects.exists()


def test_deliver_all_debounces(db, no_handlers):
    subscriber("t", group="g")(lambda delivery: None)
    debounced(1)
    debounced(2)
    assert deliver_all() == []
    assert [one.payload for one in deliver_all(advance=31)] == [2]


def test_many_duplicates_hold_up_nothing(db, monkeypatch):
    monkeypatch.setattr(debouncing, "PENDING", 3)
    publish("t", 1, key="k", id="a")
    sequence()
    debounced(2, id="b", delay=5)
    for _ in range(10):
        debounced(1, id="a", delay=5)
    advance(6)
    for _ in range(10):
        sequence()
    assert (in_log(), waiting()) == (["a", "b"], [])


# -- what people see --------------------------------------------------------------


def test_commands_and_lists_say_so(db, capsys):
    debounced(1, id="1")
    debounced(2, id="2")
    publish("t", 3, id="3", delay=60)
    assert [one.coalesce_key for one in scheduled.list_scheduled(using=USING).rows] == ["c", "c", ""]
    assert [one.coalesce_key for one in list_scheduled(topic="t").rows] == ["c", "c", ""]
    call_command("queuescheduled", "t")
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("  debounced: c") for line in lines] == [True, True, False]
    call_command("queuescheduled", "t", "--format=json")
    assert [one["coalesce_key"] for one in json.loads(capsys.readouterr().out)["scheduled"]] == ["c", "c", ""]
    call_command("queuestatus")
    assert "debounced" not in capsys.readouterr().out
    advance(31)
    call_command("queuesequence")
    assert capsys.readouterr().out == "Moved 1 message.\n1 debounced message replaced by later ones.\n"
    call_command("queuestatus")
    assert "1 debounced message replaced by later ones before entering the log." in capsys.readouterr().out
    call_command("queuestatus", "--format=json")
    assert json.loads(capsys.readouterr().out)["debounced"] == 1
    assert get_overview().debounced == 1


@pytest.mark.servers_only
def test_plain_sql_debounces(db):
    """``docs/tables.md``."""
    (sql,) = [sql for _, sql in blocks(DOCS / "tables.md", "sql") if "queue_debounced" in sql]
    for _ in range(2):
        with transaction.atomic(), connection.cursor() as cursor:
            for statement in sql.split(";"):
                if statement.strip():
                    cursor.execute(statement)
    assert DebouncedMessage.objects.count() == 2
    advance(31)
    sequence()
    assert len(in_log()) == count_replaced() == 1


@pytest.mark.servers_only
def test_ids_that_are_not_consecutive(db):
    """As on the nodes of a Galera cluster."""
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION auto_increment_increment = 7, auto_increment_offset = 3")
        try:
            for number in range(2):
                messages = [Message(n, key="k", coalesce="c", delay=5) for n in range(5)]
                publish_many("t", [Message("other", delay=5), *messages, Message("another")])
                debounced(number, delay=5)
        finally:
            cursor.execute("SET SESSION auto_increment_increment = DEFAULT, auto_increment_offset = DEFAULT")
    ids = {row.outbox_id: row.message_id for row in OutboxMessage.objects.all()}
    rows = {row.outbox_id: row.message_id for row in DebouncedMessage.objects.all()}
    assert len(rows) == 12
    assert rows.items() <= ids.items()


# -- what others have left --------------------------------------------------------


def test_a_pass_that_only_replaces_goes_on(db):
    for number in range(10):
        debounced(number, coalesce=f"c{number}", delay=5)
        debounced(number, coalesce=f"c{number}", delay=60)
    publish("t", "other", key="k", id="other", delay=6)
    advance(7)
    done = sequencing.sequence(USING, max_rows=4)
    assert (done.moved, done.replaced, done.more) == (0, 4, True)


def test_an_addition_has_the_limits_of_a_pass(db):
    for number in range(5):
        debounced("x", coalesce=f"c{number}", delay=5, max_delay=5)
        debounced("x" * 1000, coalesce=f"c{number}", delay=5, max_delay=5)
        DebouncedMessage.objects.filter(coalesce_key=f"c{number}").update(deliver_by=1)
    OutboxMessage.objects.filter(size__lt=100).update(deliver_at=1000)
    assert [sequencing.sequence(USING, max_bytes=2500).moved for _ in range(3)] == [2, 2, 1]


def test_a_row_that_was_left_behind_holds_up_no_publisher(db, settings):
    """The outbox was emptied, so that its numbers begin again."""
    debounced(1, id="1")
    left = DebouncedMessage.objects.get()
    OutboxMessage.objects.all().delete()
    debounced(2, id="2")
    row = OutboxMessage.objects.get()
    DebouncedMessage.objects.all().delete()
    left.outbox_id = row.outbox_id + 1
    left.save(force_insert=True)
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("UPDATE sqlite_sequence SET seq = %s WHERE name = 'queue_outbox'", [row.outbox_id])
        else:
            OutboxMessage.objects.all().delete()
            cursor.execute(f"ALTER TABLE queue_outbox AUTO_INCREMENT = {row.outbox_id + 1}")
    debounced(3, id="3", coalesce="other")
    assert OutboxMessage.objects.filter(message_id="3", outbox_id=left.outbox_id).exists()
    assert debouncing.collect(USING) == (1, None)
    advance(31)
    sequence()
    assert "3" in in_log()


@pytest.mark.parametrize("partitions", [None, 1])
def test_messages_of_other_keys_are_not_replaced(db, settings, partitions):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": partitions}} if partitions else {}}
    for key in ("a", "b", None):
        for number in range(2):
            publish("t", number, key=key, id=f"{key}{number}", coalesce="c", delay=5)
    assert {one.coalesce_key for one in list_scheduled(topic="t").rows} == {"c"}
    advance(6)
    sequence()
    assert sorted(in_log()) == ["None1", "a1", "b1"]
