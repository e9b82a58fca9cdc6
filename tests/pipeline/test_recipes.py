"""The queries of the page on reports run as they are printed, and are right."""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import CollectedTopic, QueueMessage, Reader, Sequencer
from pyspark_mysqlqueue.archive import run
from pyspark_mysqlqueue.archive.root import Root
from pyspark_mysqlqueue.archive.run import Job
from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.tables import SOURCES, connect
from tests.support.factories import QueueMessageFactory
from tests.support.harness import Sub, handler, sequence
from tests.support.spark_log import HOSTILE, expected

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "report.md"
RECIPES = dict(re.findall(r"^### ([^\n]+)\n(?:(?!^###).)*?```sql\n(.*?)```", PAGE.read_text(), re.M | re.S))
BLOCKS = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.S)


@pytest.fixture
def queue(place: Place, settings: Any) -> Place:
    """Ten messages, of which two fail and are dead-lettered."""
    settings.MYSQLQUEUE = {"GROUPS": {"all": {"RECORD_DELIVERIES": "all"}}}

    def fail(delivery: Any) -> None:
        if delivery.payload["n"] % 5 == 0:
            raise ValueError(f"{delivery.payload['n']} is too round")

    publish_many("orders", (Message({"n": n, "status": "new"}, key=f"k{n % 3}") for n in range(1, 11)))
    sub = Sub(handler("orders", "all", fail, max_attempts=1))
    sub.settle()
    sub.poller.write_rollups()
    sub.leave()
    sequence()
    return place


def rows(place: Place, recipe: str) -> list[dict[str, Any]]:
    with connect(place) as duck:
        found: list[dict[str, Any]] = duck.sql(RECIPES[recipe]).to_arrow_table().to_pylist()
    return found


@pytest.mark.any_engine
@pytest.mark.parametrize("recipe", BLOCKS)
def test_every_recipe_has_rows(queue, recipe):
    with connect(queue) as duck:
        assert duck.sql(recipe).to_arrow_table().num_rows


@pytest.mark.any_engine
def test_what_recipes_count(queue):
    assert sum(row["messages"] for row in rows(queue, "Messages per minute")) == 12
    assert [row["messages"] for row in rows(queue, "Time from the log to the ack")] == [10]
    assert [row["acks"] for row in rows(queue, "Time in handlers")] == [8]
    (failure,) = rows(queue, "Failures by error")
    assert failure["line"].endswith("ValueError: N is too round")
    assert (failure["attempts"], failure["messages"]) == (2, 2)
    (letter,) = rows(queue, "Dead letters by error")
    assert (letter["failed_group"], letter["original_topic"], letter["dead_letters"]) == ("all", "orders", 2)
    assert letter["line"] == failure["line"]
    (day,) = rows(queue, "Outcomes by day")
    assert (day["acked"], day["dead_lettered"]) == (8, 2)
    assert [(row["settled"], row["share"]) for row in rows(queue, "Messages by subscriber")] == [(10, 1.0)]
    assert rows(queue, "Backlog over time")[-1]["backlog"] == 0
    (recorded,) = rows(queue, "How much is recorded")
    assert (recorded["acks_recorded"], recorded["acks_counted"], recorded["failures_recorded"]) == (8, 8, 2)
    fields = {(row["topic"], row["status"]): row["messages"] for row in rows(queue, "Fields of payloads")}
    assert fields["orders", "new"] == 10


def table(place: Place, name: str, **options: Any) -> list[tuple[Any, ...]]:
    with connect(place, **options) as duck:
        found = duck.sql(f"SELECT * FROM {name} ORDER BY ALL").to_arrow_table().to_pylist()
    return [tuple(row.values()) for row in found]


@pytest.mark.any_engine
def test_the_log_of_the_database_and_the_archive(place, tmp_path):
    for text in HOSTILE:
        QueueMessageFactory(topic=text, partition_key=text, payload=text.encode(), last_error=text, failed_at=5)
    assert table(place, "log") == expected()
    root = Root(str(tmp_path / "archive"))
    run.grow(Job(None, place, root))
    QueueMessageFactory(expires_at=7)
    whole = expected()
    assert table(place, "log", root=root) == whole
    QueueMessage.objects.filter(pk=whole[0][0]).delete()
    CollectedTopic.objects.create(topic=HOSTILE[0], collected_offset=whole[0][0], published_at=1)
    assert table(place, "log", root=root) == whole
    one = [row[:2] for row in whole if row[1] == HOSTILE[6]]
    assert table(place, "log", root=root, topics=[HOSTILE[6]], columns=["offset", "topic"]) == one


def test_an_archive_of_several_logs(place, tmp_path):
    QueueMessageFactory(), QueueMessageFactory()
    job = Job(None, place, Root(str(tmp_path / "archive")))
    run.grow(job)
    Reader.objects.all().delete()
    Sequencer.objects.update(log_id="11111111-1111-1111-1111-111111111111")
    run.grow(job)
    assert table(place, "log", root=job.root) == expected()


@pytest.mark.parametrize("name", SOURCES)
def test_the_other_tables(queue, name):
    source = SOURCES[name]
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(source.columns)} FROM {source.table} ORDER BY 1, 2, 3, 4")
        rows = cursor.fetchall()
    found = [tuple(map(milliseconds, row)) for row in table(queue, name)]
    assert sorted(found, key=str) == sorted((tuple(map(int_or_text, row)) for row in rows), key=str)
    assert found
    assert len(table(queue, name, topics=["orders"])) == len(found)
    assert table(queue, name, topics=["other"]) == []
    if source.time:
        last = max(row[source.columns.index(source.time)] for row in rows)
        moment = datetime.datetime.fromtimestamp(last / 1000, datetime.UTC)
        after = table(queue, name, since=moment)
        before = table(queue, name, until=moment)
        assert after
        assert len(after) + len(before) == len(found)


def milliseconds(value: Any) -> Any:
    return round(value.timestamp() * 1000) if isinstance(value, datetime.datetime) else value


def int_or_text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else int(value) if isinstance(value, bool) else value


def test_what_cannot_be_connected_to(place, monkeypatch):
    with pytest.raises(PipelineError, match=r"columns \['size\?'\]: must be among offset, topic"):
        connect(place, columns=["offset", "size?"])
    with pytest.raises(PipelineError, match=r"tables \['leases'\]: must be among deliveries, rollups, groups"):
        connect(place, tables=["leases"])
    with pytest.raises(PipelineError, match=r"since 2026-11-02T00:00:00: must have a time zone"):
        connect(place, since=datetime.datetime(2026, 11, 2))  # noqa: DTZ001
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(PipelineError, match=r"run pip install 'pyspark-mysqlqueue\[report\]'"):
        connect(place)
