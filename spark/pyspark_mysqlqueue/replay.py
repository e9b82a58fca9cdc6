"""Replay archived messages: to another topic, or to one group of their topic.

The message id of a copy is made from the name of the run and the offset of the original. To finish a replay that was
interrupted, run it again: copies that are already in the log are dropped as duplicates.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pyspark_mysqlqueue import frames, log_offsets
from pyspark_mysqlqueue.archive.run import Job
from pyspark_mysqlqueue.archive.table import Table
from pyspark_mysqlqueue.errors import InvalidMessage, PipelineError
from pyspark_mysqlqueue.options import Edge
from pyspark_mysqlqueue.reading import Span
from pyspark_mysqlqueue.shared.ids import REPLAY_RUN
from pyspark_mysqlqueue.shared.rules import REPLAYED_FROM, check_name
from pyspark_mysqlqueue.sink import LARGEST

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    Archived = Callable[..., DataFrame]

GROUPS = "queue_consumer_groups"
CAME_FROM = REPLAYED_FROM
SLICE_OFFSETS = 100_000
"""Maximum number of offsets that are written at a time. Each task is one transaction."""
SLICE_SECONDS = 5
"""With a rate, the number of seconds whose messages are written at a time."""
TASKS = 8
JSON_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class Replay:
    """The messages to replay, and their target.

    Attributes:
        topic: The topic of the originals.
        since: The first offset, or the first time of publishing.
        until: The end, not included.
        where: A condition on the log's columns, in Spark SQL.
        to: The topic of the copies, other than that of the originals.
        group: The only group, on the same topic, that receives the copies. Give either ``to`` or ``group``.
        run: The name of the run. The default is a digest of the other attributes except ``rate``.
        rate: The maximum number of messages per second (None: no limit).

    Raises:
        PipelineError: An attribute is invalid.
    """

    topic: str
    since: Edge = "earliest"
    until: Edge = "latest"
    where: str = ""
    to: str = ""
    group: str = ""
    run: str = ""
    rate: float | None = None

    def __post_init__(self) -> None:
        try:
            if self.to:
                check_name("topic", self.to)
            if self.group:
                check_name("group", self.group)
        except InvalidMessage as error:
            raise PipelineError(str(error)) from error
        if self.since == "latest":
            raise PipelineError("--between latest …: the range would be empty; use an offset, a time or 'earliest'")
        if self.until == "earliest":
            raise PipelineError("--between … earliest: the range would be empty; use an offset, a time or 'latest'")
        if bool(self.to) == bool(self.group):
            raise PipelineError("pass either --to (the topic of the copies) or --group (the group that receives them)")
        if self.to == self.topic:
            raise PipelineError(
                f"--to {self.to}: copies in the topic of their originals would reach every group on it; pass --group"
            )
        if self.run and not REPLAY_RUN.fullmatch(self.run):
            raise PipelineError(f"run {self.run!r}: must be 1 to 60 characters from A-Z, a-z, 0-9, '.', '_' and '-'")
        if self.rate is not None and not self.rate > 0:
            raise PipelineError(f"rate {self.rate!r}: must be greater than 0")

    @property
    def name(self) -> str:
        """The name of the run: ``run``, or else a digest of the other attributes except ``rate``."""
        if self.run:
            return self.run
        what = [self.topic, str(self.since), str(self.until), self.where, self.to, self.group]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

    @property
    def target(self) -> str:
        """The topic of the copies."""
        return self.to or self.topic


@dataclass(frozen=True, slots=True)
class Plan:
    """The effect that a replay would have."""

    rows: int
    """The number of messages."""
    size: int
    """The bytes of their payloads."""
    keys: int
    """The number of partitions."""
    first: datetime.datetime | None
    """When the first of the originals was published."""
    last: datetime.datetime | None
    """When the last of the originals was published."""
    span: Span
    """The offsets of the originals."""
    groups: tuple[str, ...]
    """The groups that would receive the copies."""


def plan(job: Job, replay: Replay) -> Plan:
    """Count the messages that would be replayed, and find the groups that would receive them.

    Raises:
        PipelineError: The archive has no message of the topic, the group is not registered, or the condition is not
            valid.
    """
    from pyspark.sql import functions as F  # noqa: N812

    archived, span, groups = _look(job, replay)
    row = _originals(archived, replay, span).agg(
        F.count("*").alias("rows"),
        F.coalesce(F.sum("size"), F.lit(0)).alias("size"),
        F.countDistinct("partition_key").alias("keys"),
        F.min("published_at").alias("first"),
        F.max("published_at").alias("last"),
    )
    found = row.collect()[0]
    return Plan(found.rows, int(found.size), found["keys"], found["first"], found["last"], span, groups)


def play(job: Job, replay: Replay, *, progress: Callable[[int], object] = lambda offsets: None) -> int:
    """Write the copies to the outbox, in slices and in offset order.

    Args:
        job: The archive and its queue.
        replay: The messages to replay, and their target.
        progress: Called after each slice with its number of offsets.

    Returns:
        The number of copies that were written.

    Raises:
        PipelineError: As ``plan``.
    """
    archived, span, _ = _look(job, replay)
    began, played = time.monotonic(), 0
    for piece in _slices(archived, replay, span):
        played += _write(job, replay, _originals(archived, replay, piece))
        progress(len(piece))
        if replay.rate is not None:
            time.sleep(max(0.0, played / replay.rate - (time.monotonic() - began)))
    return played


def _slices(archived: Archived, replay: Replay, span: Span) -> list[Span]:
    """Return the slices: ``SLICE_OFFSETS`` offsets each or, with a rate, the messages of ``SLICE_SECONDS`` seconds."""
    if replay.rate is None:
        marks = list(range(span.above + SLICE_OFFSETS, span.up_to, SLICE_OFFSETS))
    else:
        step = max(1, int(min(SLICE_OFFSETS, replay.rate * SLICE_SECONDS)))
        offsets = _originals(archived, replay, span).select("offset").orderBy("offset").rdd.zipWithIndex()
        marks = [row.offset for row, number in offsets.filter(lambda one: one[1] % step == step - 1).collect()]
    edges = [span.above, *(mark for mark in marks if mark < span.up_to), span.up_to]
    return [Span(low, high) for low, high in itertools.pairwise(edges) if high > low]


def _look(job: Job, replay: Replay) -> tuple[Archived, Span, tuple[str, ...]]:
    """Return how to read originals, their span of offsets, and the groups that receive the copies."""
    from pyspark.sql import functions as F  # noqa: N812

    assert job.spark is not None  # noqa: S101  # A replay needs Spark.
    table = Table.open(job.root)
    with job.place.connect() as database:
        log = log_offsets.identity(database)
        groups = [
            str(group)
            for (group,) in database.rows(
                f"SELECT consumer_group FROM {GROUPS} WHERE topic = %s ORDER BY consumer_group", (replay.target,)
            )
        ]
    archived = partial(frames.archived, job.spark, table, log)
    ((least, most),) = archived(topics=[replay.topic]).agg(F.min("offset"), F.max("offset")).collect()
    if least is None:
        topics = sorted(one.topic for one in archived().select("topic").distinct().collect())
        raise PipelineError(
            f"topic {replay.topic!r}: the archive has no message of this topic (it has {', '.join(topics) or 'none'})"
        )
    if replay.group:
        if replay.group not in groups:
            raise PipelineError(
                f"group {replay.group!r} is not registered on topic {replay.topic!r}, so no group would receive the "
                f"copies (registered: {', '.join(groups) or 'none'})"
            )
        groups = [replay.group]
    above, up_to = least - 1, most
    if isinstance(replay.since, int):
        above = max(above, replay.since - 1)
    if isinstance(replay.until, int):
        up_to = min(up_to, replay.until - 1)
    return archived, Span(above, max(above, up_to)), tuple(groups)


def _originals(archived: Archived, replay: Replay, span: Span) -> DataFrame:
    from pyspark.errors import AnalysisException

    found = archived(
        topics=[replay.topic],
        since=replay.since if isinstance(replay.since, datetime.datetime) else None,
        until=replay.until if isinstance(replay.until, datetime.datetime) else None,
        span=span,
    )
    found = found.where(_is_for(replay))
    try:
        return found.where(replay.where) if replay.where else found
    except AnalysisException as error:
        raise PipelineError(f"--where {replay.where!r}: {error}") from error


def _is_for(replay: Replay) -> Column:
    """Return the condition that leaves out messages that must not be replayed to this target.

    A message for one group may be replayed only to that group. Even then, redriven dead letters and copies of an
    earlier replay are left out: their originals are in the same topic, and both would be handled.
    """
    from pyspark.sql import functions as F  # noqa: N812

    for_all = F.col("target_group") == ""
    if not replay.group:
        return for_all
    was_replayed = F.get_json_object("metadata", f"$.{CAME_FROM}.offset").isNotNull()
    return for_all | ((F.col("target_group") == replay.group) & (F.col("original_id") == "") & ~was_replayed)


def copies(originals: DataFrame, replay: Replay) -> DataFrame:
    """Return the rows for the sink: the originals with message ids of this run and ``replayed_from`` in their metadata.

    Copies keep the partition of their original, even one made by hashing, so the order in each partition is kept, and
    with it the priority. They do not expire, and supersede no message.
    """
    from pyspark.sql import functions as F  # noqa: N812

    origin = F.to_json(
        F.struct(
            F.lit(replay.name).alias("run"),
            "topic",
            "offset",
            "id",
            F.unix_millis("published_at").alias("published_at"),
        )
    )
    # MariaDB and SQLite keep white space around a JSON object.
    text = F.trim(F.col("metadata"), F.lit(JSON_SPACE))
    inner = F.substring(text, F.lit(2), F.length(text) - 2)
    noted = F.concat(
        F.lit("{"),
        F.when(F.trim(inner, F.lit(JSON_SPACE)) == "", F.lit("")).otherwise(F.concat(inner, F.lit(","))),
        F.lit(f'"{CAME_FROM}":'),
        origin,
        F.lit("}"),
    )
    return originals.select(
        F.lit(replay.target).alias("topic"),
        F.concat(F.lit(f"replay-{replay.name}-"), F.col("offset")).alias("id"),
        "payload",
        "partition_key",
        "publisher_key",
        noted.alias("metadata"),
        F.lit(replay.group).alias("target_group"),
        "offset",
    )


def _write(job: Job, replay: Replay, originals: DataFrame) -> int:
    from pyspark.sql import Observation
    from pyspark.sql import functions as F  # noqa: N812

    counted = Observation()
    rows = (
        copies(originals, replay)
        .observe(counted, F.count("*").alias("rows"))
        .repartition(TASKS, "partition_key")
        .sortWithinPartitions("offset")
        .drop("offset")
    )
    options = {**job.place.options(), "keepPartitions": "true", "maxPayloadBytes": str(LARGEST)}
    rows.write.format("mysqlqueue").mode("append").options(**options).save()
    return int(counted.get["rows"])
