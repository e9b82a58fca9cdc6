"""mysqlclient and PyMySQL: what one of them reads, writes and reports, the other one does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
from django.db import connection
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import OutboxMessage
from pyspark_mysqlqueue import databases, log_offsets, reading
from pyspark_mysqlqueue.databases import URL_VARIABLE, Place
from pyspark_mysqlqueue.log_schema import NAMES
from pyspark_mysqlqueue.reading import Query, Span
from pyspark_mysqlqueue.sink import Sink
from tests.support.harness import sequence
from tests.support.spark_log import HOSTILE

pytestmark = pytest.mark.servers_only
BYTES = [bytes(range(256)), b"", b"it's %s \\ \x00 \xff\n", "é".encode()]


@pytest.fixture(params=databases.DRIVERS)
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(databases, "DRIVERS", (request.param,))
    name: str = request.param
    return name


def whole_log(place: Place) -> Iterator[pa.RecordBatch]:
    with place.connect() as database:
        span = Span(0, log_offsets.highest(database))
    return reading.read(place, Query(NAMES), span)


def all_rows(place: Place) -> list[dict[str, Any]]:
    return pa.Table.from_batches(whole_log(place)).to_pylist()


def test_they_read_the_same(place, monkeypatch):
    publish_many("t", (Message(text, key=text.strip() or None, metadata={"m": text}) for text in HOSTILE))
    sequence()
    found = []
    for name in databases.DRIVERS:
        monkeypatch.setattr(databases, "DRIVERS", (name,))
        found.append(all_rows(place))
    assert found[0] == found[1]
    assert [json.loads(row["payload"]) for row in found[0]] == HOSTILE


def test_they_write_the_same(place, driver):
    schema = StructType(
        [
            StructField("topic", StringType()),
            StructField("id", StringType()),
            StructField("payload", BinaryType()),
            StructField("partition_key", StringType()),
        ]
    )
    keys = ["it's", "100 %", "É\N{PILE OF POO}", "\\"]
    columns = [["t"] * len(BYTES), [f"i{number}" for number in range(len(BYTES))], BYTES, keys]
    batch = pa.RecordBatch.from_arrays([pa.array(values) for values in columns], names=schema.names)
    assert Sink.of(place.options(), schema, overwrite=False).write(iter([batch])) == len(BYTES)
    rows = OutboxMessage.objects.order_by("outbox_id").values_list("payload", "partition_key")
    assert [(bytes(payload), key) for payload, key in rows] == list(zip(BYTES, keys, strict=True))


def test_a_killed_connection_is_lost_and_the_lock_with_it(place, driver):
    with place.connect() as database, place.connect() as other:
        assert database.lock("l")
        assert not other.lock("l")
        (number,) = database.row("SELECT CONNECTION_ID()")
        with connection.cursor() as cursor:
            cursor.execute(f"KILL {number}")
        with pytest.raises(Exception, match=r"gone away|[Ll]ost connection|killed|closed") as caught:
            database.rows("SELECT 1")
        assert databases.is_lost(caught.value)
        assert other.lock("l")


def test_reading_goes_on_after_a_lost_connection(place, driver, monkeypatch):
    publish_many("t", (Message(number) for number in range(300)))
    sequence()
    whole = all_rows(place)
    monkeypatch.setattr(reading, "FETCH_ROWS", 100)
    batches = whole_log(place)
    found = next(batches).to_pylist()
    with connection.cursor() as cursor:
        cursor.execute("SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()")
        ((number,),) = cursor.fetchall()
        cursor.execute(f"KILL {number}")
    for batch in batches:
        found += batch.to_pylist()
    assert found == whole


def test_a_row_that_exists_is_a_duplicate(place, driver):
    insert = "INSERT INTO queue_collected (topic, collected_offset, published_at) VALUES ('t', 1, 1)"
    with place.connect() as database:
        assert database.execute(insert) == 1
        with pytest.raises(Exception, match="Duplicate") as caught:
            database.execute(insert)
        assert database.is_duplicate(caught.value)
        assert not databases.is_lost(caught.value)


def test_an_option_file_has_the_connection(place, driver, tmp_path: Path):
    details = json.loads(os.environ[URL_VARIABLE])
    lines = [f"{'socket' if name == 'unix_socket' else name}={value}" for name, value in details.items()]
    (tmp_path / "queue.cnf").write_text("\n".join(["[client]", *lines, ""]))
    with Place(defaults_file=str(tmp_path / "queue.cnf")).connect() as database:
        assert database.row("SELECT DATABASE()") == (details["database"],)


def test_a_url_has_the_connection(place, driver, monkeypatch):
    details = json.loads(os.environ[URL_VARIABLE])
    host = details.get("host", "localhost")
    port = f":{details['port']}" if "port" in details else ""
    socket = f"?unix_socket={quote(details['unix_socket'])}" if "unix_socket" in details else ""
    user = f"{details['user']}:{details.get('password', '')}".rstrip(":")
    monkeypatch.setenv("OTHER_URL", f"mysql://{user}@{host}{port}/{details['database']}{socket}")
    with Place(url_variable="OTHER_URL").connect() as database:
        assert database.row("SELECT DATABASE()") == (details["database"],)
