"""The source and the sink with the columns of Spark's Kafka source and sink."""

from __future__ import annotations

import datetime
import re
import zlib
from typing import Any

import pytest
from pyspark.errors import PySparkException

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from pyspark_mysqlqueue import kafka_columns, kafka_schema
from tests.support.factories import QueueMessageFactory
from tests.support.harness import sequence
from tests.support.internals import messages
from tests.support.spark_log import HOSTILE, LANES, UTC, needs_filters, needs_streams

KAFKA_SCHEMA = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, timestampType INT"
)
"""Of Spark's Kafka source."""
MINIMAL = "topic STRING, key STRING, value STRING"
HEADERS = "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"


def kafka(spark: Any, **options: Any) -> Any:
    given = {"columns": "kafka", "subscribe": "t", **options}
    return spark.read.format("mysqlqueue").options(**given).load()


def write(frame: Any, **options: Any) -> None:
    frame.write.format("mysqlqueue").mode("append").options(**options).save()


@needs_streams
def test_a_job_of_sparks_kafka_guide_runs_with_two_lines_changed(spark, tmp_path):
    """The guide's stream from a topic to another, with the format and the servers replaced."""
    publish_many("topic1", (Message({"n": n}, key=f"k{n}") for n in range(5)))
    sequence()
    df = (
        spark.readStream.format("mysqlqueue")  # .format("kafka")
        .option("columns", "kafka")  # .option("kafka.bootstrap.servers", "host1:port1,host2:port2")
        .option("subscribe", "topic1")
        .option("startingOffsets", "earliest")
        .option("includeHeaders", "true")
        .load()
    )
    df = df.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)", "headers")
    ds = (
        df.writeStream.format("mysqlqueue")  # .format("kafka"), without its servers
        .option("checkpointLocation", str(tmp_path))
        .option("topic", "topic2")
        .trigger(availableNow=True)
        .start()
    )
    ds.awaitTermination()
    sequence()
    copied = ("partition_key", "payload", "metadata")
    originals = QueueMessage.objects.filter(topic="topic1").order_by("payload").values_list(*copied)
    copies = QueueMessage.objects.filter(topic="topic2").order_by("payload")
    assert list(copies.values_list(*copied)) == list(originals)
    assert len({copy.message_id for copy in copies}) == 5


def test_every_column(spark):
    for number, text in enumerate(HOSTILE):
        QueueMessageFactory(topic="t", partition_key=text, payload=text.encode(), published_at=number * 1000)
        QueueMessageFactory(topic="t", partition_key=LANES[number % 3], publisher_key=text)
    frame = kafka(spark)
    assert frame.schema == spark.createDataFrame([], KAFKA_SCHEMA).schema
    rows = frame.orderBy("offset").collect()
    stored = list(QueueMessage.objects.order_by("offset"))
    assert len(rows) == len(stored) == 2 * len(HOSTILE)
    numbers: dict[str, int] = {}
    for row, one in zip(rows, stored, strict=True):
        key = messages.publisher_key(one.partition_key, one.publisher_key)
        if one.partition_key == "":
            key = one.publisher_key
        assert row.key == (None if key is None else key.encode())
        assert (row.value, row.topic, row.offset) == (bytes(one.payload), one.topic, one.offset)
        assert row.timestamp.astimezone(UTC) == datetime.datetime.fromtimestamp(one.published_at / 1000, UTC)
        assert row.timestampType == 1
        assert numbers.setdefault(one.partition_key, row.partition) == row.partition >= 0
    assert numbers == {text: zlib.crc32(text.encode()) % 2**31 for text in numbers}  # CRC32() in SQL


def test_headers(spark):
    metadata = {"text": "é", "number": 1, "list": [1, "é"], "null": None, "": ""}
    QueueMessageFactory(topic="t", metadata=metadata)
    QueueMessageFactory(topic="t", metadata={})
    first, second = kafka(spark, includeHeaders="true").orderBy("offset").collect()
    assert {header.key: header.value for header in first.headers} == {
        "text": "é".encode(),
        "number": b"1",
        "list": '[1, "é"]'.encode(),
        "null": None,
        "": b"",
    }
    assert second.headers is None


@pytest.mark.parametrize(("text", "found"), [('{"a": "\\ud800"}', [("a", b"?")]), ("[1]", None), ("{", None)])
def test_headers_of_metadata_that_others_have_stored(text, found):
    assert kafka_columns.headers(text) == found


@pytest.mark.any_engine
@pytest.mark.parametrize("column", ["timestampType", "partition", "key", "headers", "timestamp"])
def test_a_narrower_schema(spark, column):
    QueueMessageFactory.create_batch(2, topic="t", partition_key="k")
    narrow = spark.read.format("mysqlqueue").schema(f"{column} {kafka_schema.TYPES[column]}")
    assert narrow.options(columns="kafka", subscribe="t", includeHeaders="true").load().count() == 2
    if column != "headers":
        with pytest.raises(PySparkException, match="must be"):
            spark.read.format("mysqlqueue").schema(f"{column} DOUBLE").options(
                columns="kafka", subscribe="t"
            ).load().count()


@needs_filters
@pytest.mark.any_engine
@pytest.mark.parametrize(
    "condition",
    ["topic = 'a'", "offset > {0}", "key = 'k1'", "value IS NOT NULL AND topic IN ('a', 'c')", "partition = 3",
     "headers[0].key = 'm'", "timestamp > '2020-01-01'", "timestamp < '2020-01-01'", "key IS NULL"],
)  # fmt: skip
def test_filters_give_what_spark_alone_would(spark, condition):
    for number in range(6):
        QueueMessageFactory(topic="abc"[number % 3], partition_key=("k1", "")[number % 2], metadata={"m": number})
    where = condition.format(QueueMessage.objects.earliest("offset").offset)
    options = {"columns": "kafka", "subscribePattern": ".*", "includeHeaders": "true"}
    frame = spark.read.format("mysqlqueue").options(**options)
    alone = frame.load().where(where).orderBy("offset").collect()
    assert frame.option("pushFilters", "true").load().where(where).orderBy("offset").collect() == alone


# -- the sink -----------------------------------------------------------------


def test_rows_with_kafkas_columns_become_messages(spark):
    rows = [
        ("t", b"k\xc3\xa9", b"\xff", [("content_type", b"text/plain"), ("n", None), ("n", b"2")], "1"),
        ("t", None, b"x", None, "2"),
        ("t", b"", b"x", [], "3"),
    ]
    write(spark.createDataFrame(rows, f"topic STRING, key BINARY, value BINARY, {HEADERS}, id STRING"))
    found = OutboxMessage.objects.order_by("message_id").values_list("topic", "partition_key", "payload", "metadata")
    assert [(topic, key, bytes(payload), metadata) for topic, key, payload, metadata in found] == [
        ("t", "ké", b"\xff", {"content_type": "text/plain", "n": "2"}),
        ("t", "", b"x", {}),
        ("t", "", b"x", {}),
    ]


@pytest.mark.any_engine
def test_rows_without_an_id_are_published_each_time(spark):
    frame = spark.createDataFrame([("a", "x"), (None, "y")], "key STRING, value STRING")
    for _ in range(2):
        write(frame, topic="t", partitions="3")
    sequence()
    assert QueueMessage.objects.filter(topic="t").count() == 4
    assert all(re.fullmatch("[0-9a-f-]{36}", one.message_id) for one in QueueMessage.objects.all())


@pytest.mark.any_engine
def test_the_option_topic_precedes_the_column_as_with_kafka(spark):
    write(spark.createDataFrame([("a", "1", "x")], "topic STRING, id STRING, payload STRING"), topic="b")
    assert OutboxMessage.objects.get().topic == "b"


@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("key STRING, value STRING", "missing column 'topic': the sink requires topic, value"),
        ("topic STRING, key STRING", "missing column 'value'"),
        (
            f"{MINIMAL}, payload STRING",
            "column 'payload' together with key, value: pass topic, key, value, headers, id",
        ),
        (f"{MINIMAL}, priority INT", "column 'priority' together with key, value"),
        (f"{MINIMAL}, partition INT", "unknown column 'partition'"),
        (f"{MINIMAL}, headers MAP<STRING, BINARY>", "'headers' of type map"),
    ],
)
def test_a_bad_schema_is_named(spark, schema, says):
    with pytest.raises(PySparkException) as caught:
        write(spark.createDataFrame([], schema))
    assert says in str(caught.value)


@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("row", "says"),
    [
        ((b"k", None, None), "value None: must not be null"),
        ((b"\xff", b"x", None), "key b'\\xff': must be UTF-8"),
        ((b"k" * 191, b"x", None), "191 characters"),
        ((b"k", b"x", [("h", b"\xff")]), "header 'h' b'\\xff': must be UTF-8"),
        ((b"k", b"x", [(None, b"x")]), "a header and its key must not be null"),
        ((b"k", b"x", [("mysqlqueue.replaces", b"x")]), "reserved for the queue"),
    ],
)
def test_a_bad_row_is_named(spark, row, says):
    with pytest.raises(PySparkException) as caught:
        write(spark.createDataFrame([row], f"key BINARY, value BINARY, {HEADERS}"), topic="t")
    assert says in str(caught.value).replace("\\\\", "\\")
    assert not OutboxMessage.objects.exists()
