"""The log as a Spark table and as a Spark stream."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterator
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.testing import assertDataFrameEqual, assertSchemaEqual

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import CollectedTopic, LogMark, QueueMessage, Reader, Sequencer
from pyspark_mysqlqueue import log_marks, log_offsets, log_schema, reading
from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.frames import publisher_key
from pyspark_mysqlqueue.log_marks import Position
from pyspark_mysqlqueue.log_offsets import milliseconds
from pyspark_mysqlqueue.options import SourceOptions
from pyspark_mysqlqueue.reading import Query
from pyspark_mysqlqueue.source import LogReader
from pyspark_mysqlqueue.streams import LogStreamReader
from tests.support import garbage
from tests.support.backups import Backup, continue_after
from tests.support.factories import ConsumerGroupFactory, QueueMessageFactory
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import identify, lane, lane_of, messages, sequencing
from tests.support.spark_log import (
    HOSTILE,
    LANES,
    NO_STREAMS,
    PYSPARK,
    collected,
    expected,
    needs_filters,
    needs_streams,
)

UTC = datetime.UTC


HOUR = 3_600_000
COMPARE = {"<": lt, "<=": le, "=": eq, ">=": ge, ">": gt, "<>": ne}


def at(hour: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(1_700_000_000 + hour * 3600, UTC)


def given(options: dict[str, Any]) -> dict[str, str]:
    """Returns options as texts. By default, all topics are read."""
    of_topics = {} if "subscribe" in options or "subscribePattern" in options else {"subscribePattern": ".*"}
    return of_topics | {name: str(value) for name, value in options.items()}


def plain(spark: Any, **options: Any) -> Any:
    return spark.read.format("mysqlqueue").options(**given(options))


def log(spark: Any, **options: Any) -> Any:
    pushes = str(PYSPARK >= (4, 1)).lower()
    return spark.read.format("mysqlqueue").option("pushFilters", pushes).options(**given(options)).load()


def offsets(frame: Any) -> list[int]:
    return [row.offset for row in frame.select("offset").orderBy("offset").collect()]


def test_every_column_and_every_row(spark):
    publish_many("orders", (Message({"n": n}, key=f"k{n % 3}", metadata={"n": n, "é": None}) for n in range(50)))
    publish("clicks", b"\x00\xff\xfe")
    sequence()
    for number, text in enumerate(HOSTILE):
        QueueMessageFactory(topic=text, partition_key=text, message_id=text or "-", payload=text.encode())
        QueueMessageFactory(topic="dead", partition_key=str(number), last_error=text, failed_group="g", failed_at=5)
        QueueMessageFactory(partition_key=LANES[number % 3], publisher_key=text, coalesce_key=text, expires_at=number)
    frame = log(spark, minPartitions=3)
    assertSchemaEqual(frame.schema, spark.createDataFrame([], log_schema.ddl()).schema)
    assert collected(frame) == expected()
    assert frame.rdd.getNumPartitions() == 3


def test_an_empty_log(spark):
    assert log(spark).collect() == []


def test_topics_start_and_end(spark):
    for topic in ("a", "b", "a,b"):
        QueueMessageFactory.create_batch(3, topic=topic)
    first = QueueMessage.objects.order_by("offset").values_list("offset", flat=True)[0]
    assert log(spark, subscribe="a, b").select("topic").distinct().count() == 2
    assert log(spark, subscribe='["a,b"]').count() == 3
    assert offsets(log(spark, startingOffsets=first + 2, endingOffsets=first + 5)) == [first + 2, first + 3, first + 4]
    assert log(spark, endingOffsets=10**15).count() == 9


def test_an_offset_for_each_topic(spark):
    known = {topic: [one.offset for one in QueueMessageFactory.create_batch(4, topic=topic)] for topic in ("a", "b")}
    start, end = {"a": known["a"][1], "b": -2}, {"a": -1, "b": known["b"][3]}
    found = offsets(log(spark, subscribe="a,b", startingOffsets=json.dumps(start), endingOffsets=json.dumps(end)))
    assert found == known["a"][1:] + known["b"][:3]


def test_gc_is_noticed_in_each_topic_above_its_own_start(spark):
    known = {topic: [one.offset for one in QueueMessageFactory.create_batch(4, topic=topic)] for topic in ("a", "b")}

    def count(**start: int) -> int:
        return int(log(spark, subscribe="a,b", startingOffsets=json.dumps(start)).count())

    collect = CollectedTopic.objects.update_or_create
    collect(topic="a", defaults={"collected_offset": known["a"][2], "published_at": 1})
    collect(topic="b", defaults={"collected_offset": known["b"][2], "published_at": 1})
    QueueMessage.objects.filter(offset__in=known["a"][:3] + known["b"][1:3]).delete()
    assert count(a=-2, b=-2) == 3
    assert count(a=known["a"][3], b=-2) == 3
    with pytest.raises(PySparkException, match="topic 'a': GC has removed messages"):
        count(a=known["a"][2], b=-2)
    frame = log(spark, subscribe="a,b", startingOffsets=json.dumps({"a": known["a"][3], "b": -2}))
    assert frame.rdd.getNumPartitions() == 1  # it is planned
    collect(topic="a", defaults={"collected_offset": known["a"][3], "published_at": 1})
    with pytest.raises(PySparkException, match="topic 'a': GC has removed messages"):
        frame.collect()


def test_topics_by_a_pattern(spark):
    for topic in ("a", "ab", "b", "a.dlq"):
        QueueMessageFactory(topic=topic)
    assert sorted(row.topic for row in log(spark, subscribePattern="a.?").collect()) == ["a", "ab"]
    assert log(spark, subscribePattern="none").count() == 0
    assert log(spark).count() == 4


def test_gc_is_noticed_in_a_topic_of_a_pattern_that_it_has_emptied(spark):
    last = QueueMessageFactory(topic="a").offset
    CollectedTopic.objects.create(topic="ab", collected_offset=last, published_at=1)
    with pytest.raises(PySparkException, match="topic 'ab': GC has removed messages"):
        log(spark, subscribePattern="a.*", startingOffsets=last).count()
    assert log(spark, subscribePattern="a", startingOffsets=last).count() == 1


def test_an_unknown_topic_is_a_warning_that_names_the_nearest(place):
    QueueMessageFactory(topic="commits")
    ConsumerGroupFactory(consumer_group="g", topic="orders")
    CollectedTopic.objects.create(topic="clicks", collected_offset=1, published_at=1)
    options = SourceOptions.of({"subscribe": "commit,orders,clicks,zzz"})
    with pytest.warns(UserWarning, match="topic") as caught:
        LogReader(options, Query(("offset",))).partitions()
    assert [str(one.message) for one in caught] == [
        "topic 'commit' has no messages and no consumer group; did you mean 'commits'?",
        "topic 'zzz' has no messages and no consumer group",
    ]


@pytest.mark.any_engine
def test_a_table_whose_options_spark_has_dropped_is_refused(spark):
    publish("t", 1)
    sequence()
    spark.sql("CREATE TEMPORARY VIEW a_view USING mysqlqueue OPTIONS (subscribe 't')")
    spark.sql("CREATE TABLE a_table USING mysqlqueue OPTIONS (subscribe 't')")
    try:
        assert spark.sql("SELECT * FROM a_view").count() == 1
        with pytest.raises(PySparkException, match="Spark does not pass on the options of CREATE TABLE"):
            spark.sql("SELECT * FROM a_table").count()
        assert spark.sql("SELECT * FROM a_table WITH (subscribe = 't')").count() == 1
    finally:
        spark.sql("DROP TABLE a_table")
        spark.sql("DROP VIEW a_view")


def test_from_one_moment_to_another(spark):
    for minute in range(10):
        QueueMessageFactory(published_at=1_700_000_000_000 + minute * 60_000)
    start = datetime.datetime.fromtimestamp(1_700_000_000 + 120, UTC)
    end = start + datetime.timedelta(minutes=3)
    found = log(spark, startingTimestamp=milliseconds(start), endingTimestamp=milliseconds(end))
    assert [row.published_at.astimezone(UTC) for row in found.orderBy("offset").collect()] == [
        start + datetime.timedelta(minutes=minute) for minute in range(3)
    ]


def test_a_narrower_schema_reads_only_those_columns(spark):
    publish_many("t", range(5))
    sequence()
    frame = plain(spark).schema("id STRING, `offset` BIGINT").load()
    assert frame.columns == ["id", "offset"]
    assert frame.count() == 5
    assert plain(spark).schema("topic STRING").load().distinct().collect()[0].topic == "t"


@needs_filters
@pytest.mark.parametrize(
    ("condition", "pushed"),
    [
        ("offset > {0} AND offset <= {3}", True),
        ("offset >= {1} AND offset < {4}", True),
        ("offset = {2}", True),
        ("offset IN ({0}, {3})", False),
        ("topic = 'a'", True),
        ("topic IN ('a', 'é')", True),
        ("topic = 'a' AND partition_key = 'k1'", True),
        ("id = 'i3'", True),
        ("topic = 'a' AND topic = 'é'", True),
        ("partition_key = ''", True),
        ("offset > 5 OR topic = 'a'", False),
        ("topic LIKE 'a%'", False),
        ("size > 1", False),
        ("publisher_key IS NOT NULL", False),
        ("publisher_key = 'p1'", False),
        ("coalesce_key IS NULL AND priority = 10", False),
        ("expires_at IS NOT NULL AND topic = 'a'", False),
        ("partition_key = 'K1'", True),
        ("offset < -1", True),
        ("id = '\\'; --'", True),
    ],
)
def test_filters_give_what_spark_alone_would(spark, condition, pushed):
    for number in range(6):
        topic = ("a", "é", "A")[number % 3]
        optional = {"publisher_key": f"p{number}", "expires_at": number, "coalesce_key": ""} if number % 2 else {}
        key = ("k1", "K1", "")[number // 2]
        QueueMessageFactory(topic=topic, partition_key=key, message_id=f"i{number}", **optional)
    known = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    where = condition.format(*known)
    frame = log(spark).where(where)
    alone = plain(spark).load().where(where)
    assertDataFrameEqual(frame, alone)
    plan = frame._jdf.queryExecution().executedPlan().toString()
    kept = any(re.match(r"[-+ *():\d]*Filter ", line) for line in plan.splitlines())
    assert kept != pushed, plan


@needs_filters
@pytest.mark.parametrize("operator", ["<", "<=", "=", ">=", ">", "<>"])
def test_times_of_publishing_are_compared_in_the_database(spark, operator):
    """A filter may be finer than the log's milliseconds, and the clock may have been set back."""
    hours = (0, 30, 31, 10, 11, 40)
    for hour in hours:
        QueueMessageFactory(published_at=1_700_000_000_000 + hour * 3_600_000)
    known = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    step = datetime.timedelta(microseconds=400)
    for hour in (10, 11, 30):
        for moment in (at(hour) - step, at(hour), at(hour) + step):
            where = F.expr(f"published_at {operator} TIMESTAMP '{moment.isoformat()}'")
            frame = log(spark).where(where)
            assert offsets(frame) == [
                offset for offset, one in zip(known, hours, strict=True) if COMPARE[operator](at(one), moment)
            ]
            plan = frame._jdf.queryExecution().executedPlan().toString()
            left = re.findall(r"published_at#\d+ [<>=]+ ", plan)
            assert bool(left) == (operator == "<>"), plan


@pytest.mark.parametrize(
    ("hours", "since", "before", "first", "last"),
    [((0, 100, 80, 85, 88, 200), 90, 200, 1, 5), ((0, 160, 140, 200, 210, 220), 1, 150, 1, 2)],
)
def test_times_of_publishing_narrow_the_offsets(place, hours, since, before, first, last):
    """A bisection alone would pass messages from before the clock was set back."""
    known = [QueueMessageFactory(published_at=hour * HOUR).offset for hour in hours]
    with place.connect() as database:
        assert log_offsets.between(database, 0, reading.NEVER) == (0, reading.NEVER)
        found = log_offsets.between(database, since * HOUR, before * HOUR)
        # Of times that are far enough away, nothing is left.
        assert log_offsets.between(database, 300 * HOUR, reading.NEVER)[0] > known[-1]
        assert log_offsets.between(database, 0, 1)[1] < known[1]
    assert found[0] <= known[first]
    assert found[1] >= known[last]


@needs_filters
@pytest.mark.any_engine
def test_one_partition_of_the_log_is_read_by_one_task(spark):
    publish_many("t", (Message(n, key=f"k{n % 2}") for n in range(10)))
    sequence()
    frame = log(spark).where("topic = 't' AND partition_key = 'k1'")
    assert frame.rdd.getNumPartitions() == 1
    assert frame.count() == 5


@pytest.mark.any_engine
def test_plain_sessions_read_without_the_setting_for_filters(spark):
    publish("t", 1)
    sequence()
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        assert plain(spark).load().where("topic = 't'").count() == 1
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"password": "secret"}, "connection parameters"),
        ({"Url": "mysql://…"}, "connection parameters"),
        ({"topics": "t"}, "option 'topics': the source accepts subscribe, "),
        ({"subscribe": "t", "subscribePattern": "t"}, "one of the options subscribe and subscribePattern"),
        ({"subscribe": "[]"}, "at least one"),
        ({"subscribe": '["a"'}, "JSON list"),
        ({"subscribePattern": "("}, "not a regular expression"),
        ({"startingOffsets": "yesterday"}, "startingOffsets='yesterday'"),
        ({"startingOffsets": "-1"}, "startingOffsets='-1'"),
        ({"startingOffsets": "latest"}, "startingOffsets: 'latest' is not allowed"),
        ({"endingOffsets": "earliest"}, "endingOffsets: 'earliest' is not allowed"),
        ({"startingOffsets": "{"}, "is not JSON"),
        ({"startingOffsets": '{"t": {"0": 23}}'}, "all partitions share one sequence of offsets"),
        ({"startingOffsets": '{"t": -3}', "subscribe": "t"}, "must contain offsets, -2"),
        ({"startingOffsets": '{"t": true}', "subscribe": "t"}, "must contain offsets, -2"),
        ({"startingOffsets": '{"t": -1, "u": 1}', "subscribe": "t,u"}, "startingOffsets: 'latest' is not allowed"),
        ({"endingOffsets": '{"t": -2, "u": 1}', "subscribe": "t,u"}, "endingOffsets: 'earliest' is not allowed"),
        ({"startingOffsets": '{"t": 1}', "subscribe": "t,u"}, "exactly the topics in the option subscribe"),
        ({"startingOffsets": '{"t": 1}'}, "exactly the topics in the option subscribe"),
        ({"startingTimestamp": "2026-11-22"}, "startingTimestamp='2026-11-22'"),
        ({"columns": "Kafka"}, "columns='Kafka'"),
        ({"includeHeaders": "true"}, "pass the option columns='kafka' too"),
        ({"minPartitions": "0"}, "minPartitions='0'"),
        ({"failOnDataLoss": "perhaps"}, "true or false"),
        ({"defaultsFile": "/no/such/my.cnf"}, "/no/such/my.cnf"),
        ({"sqliteFile": "/no/such.sqlite3"}, "/no/such.sqlite3"),
        ({"urlVariable": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
    ],
)
def test_a_bad_option_is_named(spark, options, says):
    with pytest.raises(PySparkException, match=says.replace("(", r"\(")) as caught:
        plain(spark, **options).load().count()
    assert "secret" not in str(caught.value)


@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("schema", "says"), [("offset INT", "BIGINT"), ("nothing STRING", "nothing"), ("created_at BIGINT", "TIMESTAMP")]
)
def test_a_bad_schema_is_named(spark, schema, says):
    with pytest.raises(PySparkException, match=says):
        plain(spark).schema(schema).load().count()


@pytest.mark.any_engine
def test_no_password_in_plans_or_partitions(spark):
    password = connection.settings_dict["PASSWORD"] or connection.settings_dict["NAME"]
    frame = log(spark)
    plan = frame._jdf.queryExecution().toString()
    assert str(password) not in plan


@pytest.mark.parametrize("url", ["mysql://user:pa/ss@host/db", "mysql://user:pa[ss@host/db", "mysql://u:pa#ss@host/d"])
def test_no_password_in_the_error_of_a_bad_url(url, monkeypatch):
    monkeypatch.setenv("MYSQLQUEUE_URL", url)
    with pytest.raises(PipelineError, match="is not a URL") as caught:
        Place().connect()
    assert "pa" not in str(caught.value).replace("password", "")


@pytest.fixture
def no_retention(settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}


def collect_first(count: int, sub: Sub) -> list[int]:
    """Ten messages, the first ``count`` of them handled and collected; returns all offsets."""
    publish_many("t", (Message(n, key="k") for n in range(count)))
    sub.settle()
    known = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    assert garbage.collect(USING).messages == count
    publish_many("t", (Message(n, key="k") for n in range(count, 10)))
    sequence()
    return known + list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))


# -- what GC has removed ------------------------------------------------------


def test_gc_says_how_far_it_has_been(db, no_retention):
    sub = Sub(handler())
    known = collect_first(4, sub)
    row = CollectedTopic.objects.get()
    assert (row.topic, row.collected_offset) == ("t", known[3])
    assert 0 < row.published_at <= row.collected_at
    sub.settle()
    assert garbage.collect(USING).messages == 6
    assert CollectedTopic.objects.get().collected_offset == known[9]


def test_a_dry_run_of_gc_notes_nothing(db, no_retention):
    publish("t", 1)
    Sub(handler()).settle()
    assert garbage.collect(USING, dry_run=True).messages == 1
    assert not CollectedTopic.objects.exists()


def test_a_start_below_what_gc_removed_is_an_error(spark, no_retention):
    known = collect_first(4, Sub(handler()))
    with pytest.raises(PySparkException, match="GC has removed messages"):
        log(spark, startingOffsets=known[2]).count()
    assert log(spark, startingOffsets=known[2], failOnDataLoss="false").count() == 6
    assert log(spark, startingOffsets=known[4]).count() == 6
    assert log(spark).count() == 6
    assert log(spark, startingOffsets=known[2], subscribe="other").count() == 0


def test_what_gc_takes_between_planning_and_reading_is_an_error(spark, no_retention):
    sub = Sub(handler())
    collect_first(4, sub)
    careful, careless = log(spark), log(spark, failOnDataLoss="false")
    for frame in (careful, careless):
        assert frame.rdd.getNumPartitions() == 1  # it is planned
    sub.settle()
    assert garbage.collect(USING).messages == 6
    with pytest.raises(PySparkException, match="GC has removed messages"):
        careful.collect()
    assert careless.collect() == []
    assert log(spark).collect() == []


def test_a_moment_before_what_gc_removed_is_an_error(spark, no_retention):
    collect_first(4, Sub(handler()))
    moment = 1_577_836_800_000
    with pytest.raises(PySparkException, match="GC has removed messages"):
        log(spark, startingTimestamp=moment).count()
    assert log(spark, startingTimestamp=moment, failOnDataLoss="false").count() == 6


def stream(spark: Any, **options: Any) -> Any:
    options = {"startingOffsets": "earliest", **options}
    if PYSPARK < (4, 2):
        pytest.skip(NO_STREAMS)
    return spark.readStream.format("mysqlqueue").options(**given(options)).load()


def run(frame: Any, tmp_path: Any, name: str = "sunk", **trigger: Any) -> Any:
    """Runs a query over what is there now, with a checkpoint under the path; its rows go to a table in memory."""
    query = (
        frame.writeStream.format("memory")
        .queryName(name)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return query


def batches_of(frame: Any, tmp_path: Any, **options: Any) -> list[list[tuple[Any, ...]]]:
    """The micro-batches that a run makes, row by row."""
    found: list[list[tuple[Any, ...]]] = []

    def keep(batch: Any, number: int) -> None:
        found.append(collected(batch))

    frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
        availableNow=True
    ).start().awaitTermination()
    return found


# -- the stream ---------------------------------------------------------------


@pytest.mark.any_engine
def test_a_stream_goes_on_where_it_was(spark, place, tmp_path):
    publish_many("t", range(5))
    sequence()
    first = batches_of(stream(spark), tmp_path)
    publish_many("t", range(5, 8))
    sequence()
    second = batches_of(stream(spark), tmp_path)
    assert [row for batch in first + second for row in batch] == expected()
    assert batches_of(stream(spark), tmp_path) == []
    last = json.loads(sorted((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"))[-1].read_text().splitlines()[-1])
    with place.connect() as database:
        assert Position.of(last) == log_marks.position(database, QueueMessage.objects.latest("offset").offset)
    assert last["log"] == identify(USING)


@needs_streams
@pytest.mark.any_engine
def test_a_stream_begins_at_the_end_as_with_kafka(spark, tmp_path):
    publish("t", "before")
    sequence()
    frame = spark.readStream.format("mysqlqueue").option("subscribe", "t").load()
    assert not any(batches_of(frame, tmp_path))
    publish("t", "after")
    sequence()
    assert sum(map(len, batches_of(frame, tmp_path))) == 1


@pytest.mark.any_engine
def test_a_stream_keeps_the_start_of_each_topic_until_it_has_passed_it(spark, tmp_path):
    """Its checkpoint has the starts: as with Kafka, the option counts for a new query only."""
    known = {topic: [one.offset for one in QueueMessageFactory.create_batch(4, topic=topic)] for topic in ("a", "b")}

    def read(**start: int) -> list[int]:
        frame = stream(spark, subscribe="a,b", startingOffsets=json.dumps(start), maxOffsetsPerTrigger=3)
        return [row[0] for batch in batches_of(frame, tmp_path) for row in batch]

    assert read(a=known["a"][1], b=known["b"][2]) == known["a"][1:] + known["b"][2:]
    later = [QueueMessageFactory(topic=topic).offset for topic in ("a", "b")]
    assert read(a=later[1], b=later[1]) == later


@pytest.mark.any_engine
def test_a_stream_finds_new_topics_of_its_pattern(spark, tmp_path):
    first = QueueMessageFactory(topic="a1").offset
    frame = stream(spark, subscribePattern="a.")
    assert [row[0] for batch in batches_of(frame, tmp_path) for row in batch] == [first]
    QueueMessageFactory(topic="b1")
    second = QueueMessageFactory(topic="a2").offset
    assert [row[0] for batch in batches_of(frame, tmp_path) for row in batch] == [second]


@pytest.mark.any_engine
def test_a_stream_takes_no_more_than_it_was_told(spark, tmp_path):
    publish_many("t", range(25))
    sequence()
    sizes = [len(batch) for batch in batches_of(stream(spark, maxOffsetsPerTrigger=10), tmp_path)]
    assert sizes == [10, 10, 5]


@pytest.mark.any_engine
def test_a_gap_does_not_stop_a_stream(spark, tmp_path):
    publish_many("t", range(30))
    sequence()
    known = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    QueueMessage.objects.filter(offset__in=known[3:27]).delete()
    rows = [row[0] for batch in batches_of(stream(spark, maxOffsetsPerTrigger=5), tmp_path) for row in batch]
    assert rows == known[:3] + known[27:]


def test_a_batch_run_again_is_the_same(spark, tmp_path):
    """A query that dies between its offsets and its commit runs the batch again: byte for byte."""
    publish_many("t", (Message({"n": n}, key=f"k{n}") for n in range(20)))
    sequence()
    first = batches_of(stream(spark, maxOffsetsPerTrigger=8), tmp_path)
    uncommit(tmp_path)
    publish_many("t", range(100))
    sequence()
    again = batches_of(stream(spark, maxOffsetsPerTrigger=8), tmp_path)
    assert again[0] == first[-1]
    assert sum(map(len, again)) == len(first[-1]) + 100


@pytest.mark.promise("Archive")
def test_a_stream_that_fell_behind_gc_fails(spark, tmp_path, no_retention):
    publish_many("t", (Message(n, key="k") for n in range(3)))
    sequence()
    batches_of(stream(spark), tmp_path)
    publish_many("t", (Message(n, key="k") for n in range(3)))
    Sub(handler()).settle()
    assert garbage.collect(USING).messages == 6
    publish("t", "later")
    sequence()
    with pytest.raises(PySparkException, match="GC has removed messages"):
        batches_of(stream(spark), tmp_path)
    assert sum(map(len, batches_of(stream(spark, failOnDataLoss="false"), tmp_path))) == 1


def test_a_stream_that_kept_up_with_gc_goes_on(spark, tmp_path, no_retention):
    publish_many("t", (Message(n, key="k") for n in range(3)))
    Sub(handler()).settle()
    batches_of(stream(spark), tmp_path)
    assert garbage.collect(USING).messages == 3
    publish("t", "later")
    sequence()
    assert sum(map(len, batches_of(stream(spark), tmp_path))) == 1


def test_a_stream_from_earliest_reads_leftovers_below_what_gc_removed(spark, tmp_path, no_retention):
    publish_many("t", (Message(n, key=("slow", "quick")[n % 2]) for n in range(6)))
    sequence()
    for message in QueueMessage.objects.filter(partition_key="quick"):
        CollectedTopic.objects.update_or_create(
            topic="t", defaults={"collected_offset": message.offset, "published_at": message.published_at}
        )
        message.delete()
    found = batches_of(stream(spark, maxOffsetsPerTrigger=2), tmp_path)
    assert sum(map(len, found)) == 3
    CollectedTopic.objects.update(collected_offset=10**9)
    publish("t", "later")
    sequence()
    with pytest.raises(PySparkException, match="GC has removed messages"):
        batches_of(stream(spark), tmp_path)


def options_of(alias: str, folder: Path) -> dict[str, str]:
    """Options by which a stream reads a database of the tests."""
    database = connections[alias].settings_dict
    if connection.vendor == "sqlite":
        return {"sqliteFile": str(database["NAME"])}
    names = {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password", "NAME": "database"}
    lines = [f"{option} = {database[name]}" for name, option in names.items() if database[name]]
    lines += [f"socket = {database['OPTIONS']['unix_socket']}"] if "unix_socket" in database["OPTIONS"] else []
    file = folder / f"{alias}.cnf"
    file.write_text("\n".join(["[client]", *lines]))
    return {"defaultsFile": str(file)}


@pytest.mark.promise("Archive")
def test_a_checkpoint_of_another_database_is_refused(spark, queue_db, tmp_path):
    """Even if the other log is longer. Otherwise the stream would skip what it has up to the offset."""
    here, there = (options_of(alias, tmp_path) for alias in (USING, "queue"))
    publish_many("t", range(3))
    sequence()
    assert sum(map(len, batches_of(stream(spark, **here), tmp_path))) == 3
    end = QueueMessage.objects.latest("offset").offset
    publish("t", 0, using="queue")
    sequencing.sequence("queue")
    QueueMessage.objects.using("queue").all().delete()
    continue_after("queue", end - 3)
    publish_many("t", range(10), using="queue")
    sequencing.sequence("queue")
    with pytest.raises(PySparkException) as error:
        batches_of(stream(spark, **there), tmp_path)
    for alias, offset in ((USING, end), ("queue", end + 7)):
        assert f"offset {offset}" in str(error.value)
        assert identify(alias) in str(error.value)
    assert "set failOnDataLoss to false to continue after offset" in str(error.value)
    careless = stream(spark, failOnDataLoss="false", **there)
    assert sum(map(len, batches_of(careless, tmp_path))) == 7
    publish("t", "later", using="queue")
    sequencing.sequence("queue")
    assert sum(map(len, batches_of(stream(spark, **there), tmp_path))) == 1, "the checkpoint is one of this log now"


@pytest.mark.promise("Archive")
def test_a_log_that_went_back_and_has_grown_past_a_stream_is_noticed(spark, tmp_path):
    marked(range(3))
    backup = Backup(USING)
    marked(range(3))
    batches_of(stream(spark), tmp_path)
    backup.restore()
    marked(range(10))
    with pytest.raises(PySparkException, match="and the log was restored to an earlier state since; connect to"):
        batches_of(stream(spark), tmp_path)
    assert sum(map(len, batches_of(stream(spark, failOnDataLoss="false"), tmp_path))) == 7


def test_a_micro_batch_that_runs_again_on_another_log_is_refused(spark, tmp_path):
    publish_many("t", range(3))
    sequence()
    batches_of(stream(spark), tmp_path)
    uncommit(tmp_path)
    Sequencer.objects.update(log_id="another")
    with pytest.raises(PySparkException, match="this database has the log another, up to offset"):
        batches_of(stream(spark), tmp_path)


@pytest.mark.any_engine
def test_a_log_that_ends_before_a_stream_is_noticed(spark, tmp_path):
    publish_many("t", range(3))
    sequence()
    batches_of(stream(spark), tmp_path)
    QueueMessage.objects.all().delete()
    Sequencer.objects.update(last_offset=1)
    with pytest.raises(PySparkException, match="up to offset 1, but the reader is at offset"):
        batches_of(stream(spark), tmp_path)


def marked(payloads: Any) -> None:
    """Publishes messages, and marks the log at their end."""
    identify(USING)
    publish_many("t", payloads)
    Sequencer.objects.update(marked_at=0)
    sequence()


def uncommit(tmp_path: Any) -> None:
    """As if the query had died between the offsets and the commit of the last micro-batch."""
    newest = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))[-1]
    newest.unlink()
    newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)


@pytest.fixture
def variables(db: Any) -> Iterator[Callable[[str], None]]:
    """Sets the server's global variables, and sets them back."""
    before: list[str] = []
    with connection.cursor() as cursor:

        def set_global(name: str, value: str) -> None:
            cursor.execute(f"SELECT @@GLOBAL.{name}")
            before.append(f"SET GLOBAL {name} = {cursor.fetchone()[0]}")
            cursor.execute(f"SET GLOBAL {name} = {value}")

        yield set_global
        for statement in reversed(before):
            cursor.execute(statement)


@pytest.mark.promise("Archive")
def test_a_replica_that_does_not_keep_the_order_is_refused(place, variables):
    """A primary may be set so without harm."""
    if connection.vendor != "mysql" or connection.mysql_is_mariadb:
        pytest.skip("MySQL alone has this setting")
    with place.connect() as database:
        variables("replica_parallel_workers", "4")
        variables("replica_preserve_commit_order", "OFF")
        assert log_offsets.highest(database) == 0
        variables("read_only", "ON")
        with pytest.raises(PipelineError, match="replica_preserve_commit_order"):
            log_offsets.highest(database)
        variables("replica_preserve_commit_order", "ON")
        assert log_offsets.highest(database) == 0


@pytest.mark.any_engine
def test_an_end_is_no_option_of_a_stream(spark, tmp_path):
    with pytest.raises(PySparkException, match="a stream has no end"):
        batches_of(stream(spark, endingOffsets=5), tmp_path)


@pytest.mark.any_engine
def test_json_payloads_by_a_schema(spark):
    from pyspark_mysqlqueue.frames import json_payload

    publish_many("t", [{"n": 1, "name": "é"}, {"n": "no number"}, [1]])
    publish("t", b"\xff")
    sequence()
    rows = log(spark).orderBy("offset").select(json_payload("n INT, name STRING").alias("body")).collect()
    assert (rows[0].body.n, rows[0].body.name) == (1, "é")
    assert [row.body.n if row.body else None for row in rows[1:]] == [None, None, None]
    assert log(spark).where(F.col("size") > 1000).count() == 0


# -- priorities and keys ------------------------------------------------------

NAMES = [
    *(
        lane(key, number)
        for key in ("", "a", "__p:3", ":=+x", "k\nl", "\N{PILE OF POO}")
        for number in range(-100, 101)
    ),
    *("__p:", "__p:3", "__P:+010:a", " __p:+010:a", "\n__p:+010:a", "__p:+010:__p:+020:a", "a__p:+010:a"),
    *HOSTILE,
]
"""Lanes, and names that look like some. The outbox refuses a malformed lane."""


@pytest.mark.any_engine
@pytest.mark.promise("Priority")
def test_keys_are_those_of_a_delivery(spark):
    rows = [(name, key) for name in NAMES for key in (None, "", 'é\n "', "__p:3")]
    frame = spark.createDataFrame(rows, "partition_key STRING, publisher_key STRING")
    for row in frame.select("*", publisher_key().alias("key")).collect():
        assert row["key"] == messages.publisher_key(row.partition_key, row.publisher_key), row
    assert frame.count() == len(rows)


@pytest.mark.promise("Priority")
def test_the_priority_in_the_log_is_that_of_the_lane(db):
    QueueMessage.objects.bulk_create(QueueMessageFactory.build(partition_key=name) for name in dict.fromkeys(NAMES))
    for row in QueueMessage.objects.all():
        assert row.priority == lane_of(row.partition_key).priority, row.partition_key


@pytest.mark.promise("Priority")
def test_priorities_and_keys_of_the_log(spark, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"hashed": {"PARTITIONS": 3}}}
    wanted = [
        (publish(topic, 1, key=key, priority=number), number, key)
        for topic in ("t", "hashed")
        for number in (0, 7, -7)
        for key in ("a", "", None)
    ]
    sequence()
    found = log(spark).select("id", "priority", publisher_key().alias("key")).collect()
    assert sorted(map(tuple, found)) == sorted(wanted)


# -- registered readers ---------------------------------------------------------


@pytest.mark.promise("Retention")
def test_a_registered_reader_keeps_what_it_has_not_read(spark, place, tmp_path, no_retention):
    """Its position follows its checkpoint."""
    sub = Sub(handler()).step()
    marked(range(3))
    read = stream(spark, subscribe="t,u", startingOffsets="earliest", reader="lake")
    assert sum(map(len, batches_of(read, tmp_path))) == 3
    end = QueueMessage.objects.latest("offset").offset
    mark = LogMark.objects.get()
    assert set(Reader.objects.values_list("name", "topic", "read_offset", "marked_offset", "mark")) == {
        ("lake", topic, end, mark.marked_offset, mark.mark) for topic in ("t", "u")
    }
    publish_many("t", range(2))
    sub.settle()
    garbage.collect(USING)
    assert QueueMessage.objects.count() == 2, "those that it has not read"
    assert sum(map(len, batches_of(read, tmp_path))) == 2
    garbage.collect(USING)
    assert not QueueMessage.objects.exists()


def test_a_registered_reader_is_never_ahead_of_its_checkpoint(spark, tmp_path):
    """A micro-batch that fails is run again."""

    def write(batch: Any, number: int) -> None:
        if number == 1 and (tmp_path / "fail").exists():
            raise ValueError("a full disk")

    def go() -> None:
        read = stream(spark, maxOffsetsPerTrigger=2, reader="lake")
        read.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
            availableNow=True
        ).start().awaitTermination()

    marked(range(6))
    offsets = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    (tmp_path / "fail").touch()
    for _ in range(2):
        with pytest.raises(PySparkException, match="a full disk"):
            go()
        assert Reader.objects.get().read_offset == offsets[1]
    (tmp_path / "fail").unlink()
    go()
    assert Reader.objects.get().read_offset == offsets[-1]


def test_a_new_stream_is_registered_before_its_first_micro_batch(place):
    marked(range(3))
    options = {**place.options(), "subscribePattern": ".*", "startingOffsets": "2", "reader": "lake"}
    LogStreamReader(SourceOptions.of(options, is_stream=True), Query(("offset",))).initialOffset()
    assert list(Reader.objects.values_list("name", "topic", "read_offset")) == [("lake", "", 1)]


def test_a_stream_that_is_not_registered_stores_nothing(spark, tmp_path):
    marked(range(3))
    batches_of(stream(spark), tmp_path)
    assert not Reader.objects.exists()


@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("name", "is_stream", "why"),
    [
        ("lake", False, "only streams can be registered readers"),
        ("archive", True, "the archive has this name"),
        ("a b", True, "must be 1 to 100 letters"),
    ],
)
def test_wrong_readers_are_refused(name, is_stream, why):
    with pytest.raises(PipelineError, match=why):
        SourceOptions.of({"subscribe": "t", "reader": name}, is_stream=is_stream)
