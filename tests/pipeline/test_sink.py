"""Rows of a DataFrame become messages, each once."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from pyspark_mysqlqueue.frames import publisher_key
from tests.support.handlers import Recorder
from tests.support.harness import Sub, handler, sequence
from tests.support.spark_log import needs_streams

MINIMAL = "topic STRING, id STRING, payload STRING"


def write(frame: Any, **options: Any) -> None:
    given = {name: str(value) for name, value in options.items()}
    frame.write.format("mysqlqueue").mode("append").options(**given).save()


def rows(spark: Any, count: int, tasks: int = 2) -> Any:
    frame = spark.range(0, count, 1, tasks)
    return frame.select(
        F.lit("t").alias("topic"),
        F.concat(F.lit("id-"), F.col("id")).alias("id"),
        F.concat(F.lit('{"n":'), F.col("id"), F.lit("}")).alias("payload"),
        F.concat(F.lit("k"), F.col("id") % 3).alias("partition_key"),
    )


def test_rows_become_messages(spark):
    write(rows(spark, 20))
    got = Recorder()
    Sub(handler(function=got)).settle()
    assert sorted(body["n"] for body in got.payloads) == list(range(20))


def test_every_column(spark):
    moment = datetime.datetime(2031, 2, 3, 4, 5, 6, 789000, tzinfo=datetime.UTC)
    frame = spark.createDataFrame(
        [("t", "i", bytearray(b"\x00\xff"), "k \N{PILE OF POO}", '{"a": "é"}', "g", moment)],
        "topic STRING, id STRING, payload BINARY, partition_key STRING, metadata STRING, target_group STRING, "
        "deliver_at TIMESTAMP",
    )
    write(frame)
    row = OutboxMessage.objects.get()
    assert (row.topic, row.message_id, bytes(row.payload)) == ("t", "i", b"\x00\xff")
    assert (row.partition_key, row.metadata, row.target_group) == ("k \N{PILE OF POO}", {"a": "é"}, "g")
    assert row.deliver_at == int(moment.timestamp() * 1000)
    assert row.created_at > 0


def test_a_second_run_adds_nothing(spark):
    for _ in range(2):
        write(rows(spark, 30))
        sequence()
    assert QueueMessage.objects.count() == 30
    write(rows(spark, 40))
    sequence()
    assert QueueMessage.objects.count() == 40


@pytest.mark.promise("Spark writes")
def test_a_task_that_fails_and_is_run_again_adds_nothing_twice(spark, tmp_path):
    marker = str(tmp_path / "failed")

    def fail_once(value: str) -> str:
        import os

        if value == "id-17" and not os.path.exists(marker):
            open(marker, "x").close()
            raise RuntimeError("the first try")
        return value

    failing = F.udf(fail_once, "string", useArrow=False)
    frame = rows(spark, 20).withColumn("id", failing("id"))
    write(frame)
    sequence()
    assert QueueMessage.objects.count() == 20
    assert (tmp_path / "failed").exists()


def test_the_order_of_a_key_is_kept_by_the_recipe(spark):
    frame = rows(spark, 60, tasks=4).withColumn("n", F.get_json_object("payload", "$.n").cast("int"))
    write(frame.repartition(3, "partition_key").sortWithinPartitions("n").drop("n"))
    got = Recorder()
    Sub(handler(function=got)).settle()
    for key in range(3):
        numbers = [body["n"] for body in got.payloads if body["n"] % 3 == key]
        assert numbers == list(range(key, 60, 3))


@pytest.mark.any_engine
def test_hashed_partitions_are_those_of_publish(spark, settings):
    from django_mysqlqueue import publish

    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": 5}}}
    write(rows(spark, 9), partitions=5)
    for number in range(9):
        publish("t", {"n": number}, key=f"k{number % 3}", id=f"p-{number}")
    sequence()
    spark_rows = QueueMessage.objects.filter(message_id__startswith="id-").values_list("payload", "partition_key")
    ours = QueueMessage.objects.filter(message_id__startswith="p-").values_list("payload", "partition_key")
    assert sorted((bytes(body), key) for body, key in spark_rows) == sorted((bytes(body), key) for body, key in ours)
    assert {row.publisher_key for row in QueueMessage.objects.all()} == {"k0", "k1", "k2"}
    assert all("mysqlqueue.key" not in row.metadata for row in QueueMessage.objects.all())


# -- priorities ---------------------------------------------------------------

PRIORITIES = (0, 1, 10, 100, -1, -100)
LATER = datetime.datetime(2031, 2, 3, tzinfo=datetime.UTC)
COLUMNS = [field.name for field in OutboxMessage._meta.fields if field.name not in ("outbox_id", "created_at")]


def with_priorities() -> list[tuple[Any, ...]]:
    """Topic, id, payload, key, metadata, time, priority."""
    metadata = {"m": [1, "é"]}
    return [
        ("t", f"{priority} {key[:9]} {deliver_at}", '{"n":1}', key, metadata, deliver_at, priority)
        for priority in PRIORITIES
        for key in ("a", "", "k \N{PILE OF POO}", "k" * 181, ":+010:")
        for deliver_at in (None, LATER)
    ]


@pytest.mark.promise("Priority")
@pytest.mark.parametrize("partitions", [None, 5])
@pytest.mark.parametrize("kind", ["TINYINT", "SMALLINT", "INT", "BIGINT"])
def test_a_priority_is_stored_as_publish_stores_it(spark, settings, partitions, kind):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": partitions} if partitions else {}}}
    wanted = with_priorities()
    if partitions:  # Without partitions, messages that have no key share one in the sink.
        wanted += [("t", f"{one} -", '{"n":1}', None, {"m": 1}, None, one) for one in PRIORITIES]
    publish_many(
        "t",
        [
            Message({"n": 1}, key=key, id=message_id, metadata=metadata, deliver_at=deliver_at, priority=priority)
            for _, message_id, _, key, metadata, deliver_at, priority in wanted
        ],
    )
    ours = list(OutboxMessage.objects.order_by("message_id").values_list(*COLUMNS))
    OutboxMessage.objects.all().delete()
    frame = spark.createDataFrame(
        [(*one[:4], json.dumps({"content_type": "application/json", **one[4]}), *one[5:]) for one in wanted],
        f"{MINIMAL}, partition_key STRING, metadata STRING, deliver_at TIMESTAMP, priority {kind}",
    )
    write(frame, **({"partitions": partitions} if partitions else {}))
    assert list(OutboxMessage.objects.order_by("message_id").values_list(*COLUMNS)) == ours
    assert len(ours) == len(wanted)


def test_rows_without_a_priority_or_key(spark):
    frame = spark.createDataFrame(
        [("t", "1", "x", "a", None), ("t", "2", "x", "a", 0), ("t", "3", "x", None, 5), ("t", "4", "x", None, None)],
        f"{MINIMAL}, partition_key STRING, priority INT",
    )
    write(frame)
    found = OutboxMessage.objects.order_by("message_id").values_list("partition_key", "metadata", "deliver_at")
    assert list(found) == [("a", {}, 0), ("a", {}, 0), ("__p:+005:", {}, 0), ("", {}, 0)]


@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("priority", "key", "says"),
    [
        (101, "a", "priority 101: must be an integer from -100 to 100, higher first"),
        (-(2**63), None, "must be an integer from -100 to 100, higher first"),
        (1, "k" * 182, "182 characters, but with a priority at most 181 are allowed"),
        (1, "k" * 191, "191 characters, but at most 190 are allowed"),
        (1, "__p:3", "are reserved for hashed partitions and priorities"),
    ],
)
def test_a_bad_priority_is_named(spark, priority, key, says):
    frame = spark.createDataFrame(
        [("t", "good", "x", "a", 1), ("t", "bad", "x", key, priority)],
        f"{MINIMAL}, partition_key STRING, priority BIGINT",
    )
    with pytest.raises(PySparkException) as caught:
        write(frame.coalesce(1))
    assert "id 'bad'" in str(caught.value)
    assert says in str(caught.value)
    assert not OutboxMessage.objects.exists()


@pytest.mark.any_engine
def test_a_priority_of_another_type_is_refused(spark):
    with pytest.raises(PySparkException, match="'priority' of type double: must be tinyint or smallint or int or big"):
        write(spark.createDataFrame([], f"{MINIMAL}, priority DOUBLE"))


@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("column", "options", "says"),
    [
        ("priority INT", {"keepPartitions": True}, "column 'priority' with the option keepPartitions"),
        ("publisher_key STRING", {}, "column 'publisher_key' without the option keepPartitions"),
        ("publisher_key STRING", {"partitions": 3}, "column 'publisher_key' without the option keepPartitions"),
        ("metadata STRING", {"keepPartitions": True, "partitions": 3}, "'partitions' with the option keepPartitions"),
    ],
)
def test_what_contradicts_the_way_to_partitions_is_refused(spark, column, options, says):
    with pytest.raises(PySparkException, match=says):
        write(spark.createDataFrame([], f"{MINIMAL}, {column}"), **options)


@pytest.mark.promise("Priority")
@pytest.mark.parametrize("partitions", [None, 5])
@pytest.mark.parametrize("way", ["partitions", "keys"])
def test_a_copy_of_the_log_keeps_priorities_and_keys(spark, settings, partitions, way):
    """By partitions, or by publishers' keys: both ways that the how-to guide shows.

    A copy does not expire and supersedes no message.
    """
    of_topic = {"PARTITIONS": partitions} if partitions else {}
    settings.MYSQLQUEUE = {"TOPICS": {"t": of_topic, "copy": of_topic}}
    publish_many(
        "t",
        [
            Message([p, key], key=key, priority=p, metadata={"m": 1}, expires_at=LATER, coalesce=f"{p}")
            for p in PRIORITIES
            for key in ("a", "b")
        ],
    )
    sequence()
    log = spark.read.format("mysqlqueue").option("subscribe", "t").load()
    if way == "partitions":
        rows = log.select(F.lit("copy").alias("topic"), "id", "payload", "partition_key", "publisher_key", "metadata")
        write(rows, keepPartitions=True)
    else:
        rows = log.select(
            F.lit("copy").alias("topic"),
            "id",
            "payload",
            publisher_key().alias("partition_key"),
            "priority",
            "metadata",
        )
        write(rows, **({"partitions": partitions} if partitions else {}))
    stored = {row.message_id: row for row in QueueMessage.objects.filter(topic="t")}
    copies = list(OutboxMessage.objects.filter(topic="copy"))
    assert len(copies) == len(stored) == 12
    kept = ("partition_key", "publisher_key", "priority", "metadata")
    for copy in copies:
        original = stored[copy.message_id]
        assert [getattr(copy, name) for name in kept] == [getattr(original, name) for name in kept]
        assert (original.publisher_key is None) == (partitions is None)
        assert (original.expires_at, original.coalesce_key is None) == (LATER.timestamp() * 1000, False)
        assert (copy.deliver_at, copy.expires_at, copy.coalesce_key) == (0, None, None)
    got: list[Any] = []
    Sub(handler(topic="copy", function=lambda one: got.append(([one.priority, one.key], one.payload)))).settle()
    assert len(got) == 12
    assert all(found == payload for found, payload in got)


# -- statements ---------------------------------------------------------------


def test_statements_are_small(place):
    from pyspark_mysqlqueue.sink import STATEMENT_BYTES, STATEMENT_ROWS, Row, _chunks

    big = Row("t", "k", None, "i", b"x" * 300_000, "{}", "", 0)
    small = Row("t", "k", None, "i", b"x", "{}", "", 0)
    made = list(_chunks(iter([big] * 4 + [small] * 5000), STATEMENT_BYTES))
    assert max(len(chunk) for chunk in made) == STATEMENT_ROWS
    assert all(sum(row.weight for row in chunk) <= STATEMENT_BYTES for chunk in made)
    assert sum(map(len, made)) == 5004


BAD = [
    (("t", None, "x", "k", "{}"), "id None"),
    (("t", "", "x", "k", "{}"), "id ''"),
    (("t", "i" * 191, "x", "k", "{}"), "191 characters"),
    ((None, "i", "x", "k", "{}"), "topic None"),
    (("a/b", "i", "x", "k", "{}"), "topic 'a/b'"),
    (("t", "i", None, "k", "{}"), "payload None"),
    (("t", "i", "x" * 2000, "k", "{}"), "payload of 2000 bytes"),
    (("t", "i", "x", "__p:1", "{}"), "__p:"),
    (("t", "i", "x", "k" * 191, "{}"), "191 characters"),
    (("t", "i", "x", "k", "[1]"), "must be a JSON object"),
    (("t", "i", "x", "k", "{"), "is not JSON"),
    (("t", "i", "x", "k", '{"n": 18446744073709551616}'), "64 bits"),
    (("t", "i", "x", "k", '{"n": NaN}'), "NaN is not a JSON number"),
    (("t", "i", "x", "k", '{"n": 1e999}'), "too large"),
    (("t", "i", "x", "k", '{"n": "\\ud800"}'), "lone surrogate"),
    (("t", "i", "x", "k", '{"mysqlqueue.replaces": "x"}'), "reserved for the queue"),
]
"""A row, and what its error says. That nothing is stored depends on the engine, but not on the rule."""


@pytest.mark.parametrize(
    ("row", "says"), [*BAD[:2], *(pytest.param(*one, marks=pytest.mark.any_engine) for one in BAD[2:])]
)
def test_a_bad_row_is_named_and_nothing_of_its_task_is_stored(spark, row, says):
    good = [("t", f"g{number}", "x", "k", "{}") for number in range(3000)]
    schema = f"{MINIMAL}, partition_key STRING, metadata STRING"
    frame = spark.createDataFrame([*good, row], schema).coalesce(1)
    with pytest.raises(PySparkException) as caught:
        write(frame, maxPayloadBytes=1000)
    assert says in str(caught.value)
    assert not OutboxMessage.objects.exists()


@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("topic STRING, payload STRING", "missing column 'id'"),
        (f"{MINIMAL}, `offset` BIGINT", "'offset'"),
        ("topic STRING, id BIGINT, payload STRING", "'id' of type bigint"),
    ],
)
def test_a_bad_schema_is_named(spark, schema, says):
    with pytest.raises(PySparkException, match=says):
        write(spark.createDataFrame([], schema))


@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"topics": "t"}, "'topics'"),
        ({"partitions": "0"}, "partitions='0'"),
        ({"password": "x"}, "connection parameters"),
    ],
)
def test_a_bad_option_is_named(spark, options, says):
    with pytest.raises(PySparkException, match=says):
        write(rows(spark, 1), **options)


@pytest.mark.any_engine
def test_messages_are_not_overwritten(spark):
    with pytest.raises(PySparkException, match="only appends"):
        rows(spark, 1).write.format("mysqlqueue").mode("overwrite").save()


@needs_streams
@pytest.mark.promise("Spark writes")
def test_a_stream_into_the_queue(spark, tmp_path):
    """Files come in, messages go out; a micro-batch that is run again adds nothing."""
    incoming = tmp_path / "incoming"
    incoming.mkdir()

    def come(name: str, first: int) -> None:
        lines = [json.dumps({"topic": "t", "id": f"id-{n}", "payload": str(n)}) for n in range(first, first + 5)]
        (incoming / name).write_text("\n".join(lines))

    def run() -> None:
        (
            spark.readStream.schema(MINIMAL)
            .json(str(incoming))
            .writeStream.format("mysqlqueue")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
            .awaitTermination()
        )
        sequence()

    come("one.json", 0)
    run()
    come("two.json", 5)
    run()
    assert QueueMessage.objects.count() == 10
    newest = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))[-1]
    newest.unlink()
    newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)
    run()
    assert QueueMessage.objects.count() == 10
