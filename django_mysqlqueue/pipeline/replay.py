"""Archived messages back into the queue: into another topic, or for one group.

Each copy's id is made from the run's name and the original's offset, so a replay
that died is finished by running it again: what is in the log already is dropped.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_mysqlqueue import limits
from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.pipeline import frames
from django_mysqlqueue.pipeline.archive import manifest
from django_mysqlqueue.pipeline.archive.manifest import Segment
from django_mysqlqueue.pipeline.archive.run import Job
from django_mysqlqueue.pipeline.errors import PipelineError
from django_mysqlqueue.pipeline.options import Edge
from django_mysqlqueue.pipeline.reading import Span
from django_mysqlqueue.pipeline.sink import LARGEST

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

GROUPS = "queue_consumer_groups"
CAME_FROM = "replayed_from"
"""Where a copy's metadata says what it is a copy of: run, topic, offset, id, published_at (epoch milliseconds)."""
SLICE_OFFSETS = 100_000
"""Offsets that are written at a time; each of its tasks is one transaction."""
SLICE_SECONDS = 5
"""With a rate: what is written at a time is as much as that many seconds allow."""
TASKS = 8
JSON_SPACE = " \t\n\r"
_RUN = re.compile(r"[A-Za-z0-9._-]{1,60}")


@dataclass(frozen=True, slots=True)
class Replay:
    """What is to be played back, and to whom.

    Attributes:
        topic: of the originals.
        since: the first offset or moment (of ``published_at``).
        until: where it ends, not included.
        where: a condition in Spark SQL on the log's columns.
        to: the topic of the copies; not that of the originals.
        group: instead of ``to``: the one group of the same topic that sees them.
        run: its name; the same replay has the same one by default.
        rate: messages a second at most.
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
                limits.check_name("topic", self.to)
            if self.group:
                limits.check_name("group", self.group)
        except InvalidMessage as error:
            raise PipelineError(str(error)) from error
        if self.since == "latest":
            raise PipelineError("--between latest …: nothing begins at the end; give an offset, a time or 'earliest'")
        if self.until == "earliest":
            raise PipelineError("--between … earliest: nothing comes before it; give an offset, a time or 'latest'")
        if bool(self.to) == bool(self.group):
            raise PipelineError("name either the topic or the one group that the copies are for (--to or --group)")
        if self.to == self.topic:
            raise PipelineError(
                f"--to {self.to}: copies in their own topic reach every group of it; name one with --group"
            )
        if self.run and not _RUN.fullmatch(self.run):
            raise PipelineError(f"run {self.run!r}: must be 1 to 60 letters, digits, '.', '_' or '-'")
        if self.rate is not None and not self.rate > 0:
            raise PipelineError(f"rate {self.rate!r}: must be above 0")

    @property
    def name(self) -> str:
        """The run's name; without one it is a digest of what is replayed to whom."""
        if self.run:
            return self.run
        what = [self.topic, str(self.since), str(self.until), self.where, self.to, self.group]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

    @property
    def target(self) -> str:
        return self.to or self.topic


@dataclass(frozen=True, slots=True)
class Plan:
    """What a replay would do."""

    rows: int
    size: int
    """Bytes of payload."""
    keys: int
    first: datetime.datetime | None
    last: datetime.datetime | None
    span: Span
    groups: tuple[str, ...]
    """Who would see the copies."""


def plan(job: Job, replay: Replay) -> Plan:
    """Counts what would be replayed, and says to whom.

    Raises:
        PipelineError: the archive has nothing of the topic, nobody would see it, or the condition is not valid.
    """
    from pyspark.sql import functions as F  # noqa: N812

    known, span, groups = _look(job, replay)
    row = _originals(job, replay, known, span).agg(
        F.count("*").alias("rows"),
        F.coalesce(F.sum("size"), F.lit(0)).alias("size"),
        F.countDistinct("partition_key").alias("keys"),
        F.min("published_at").alias("first"),
        F.max("published_at").alias("last"),
    )
    found = row.collect()[0]
    return Plan(found.rows, int(found.size), found["keys"], found["first"], found["last"], span, groups)


def play(job: Job, replay: Replay, *, progress: Callable[[int], object] = lambda offsets: None) -> int:
    """Puts the copies into the outbox, slice by slice in offset order; returns how many."""
    known, span, _ = _look(job, replay)
    began, played = time.monotonic(), 0
    for piece in _slices(job, replay, known, span):
        played += _write(job, replay, _originals(job, replay, known, piece))
        progress(len(piece))
        if replay.rate is not None:
            time.sleep(max(0.0, played / replay.rate - (time.monotonic() - began)))
    return played


def _slices(job: Job, replay: Replay, known: list[Segment], span: Span) -> list[Span]:
    """What is written at a time: so many offsets, or with a rate as many messages as it allows in some seconds."""
    if replay.rate is None:
        marks = list(range(span.above + SLICE_OFFSETS, span.up_to, SLICE_OFFSETS))
    else:
        step = max(1, int(min(SLICE_OFFSETS, replay.rate * SLICE_SECONDS)))
        offsets = _originals(job, replay, known, span).select("offset").orderBy("offset").rdd.zipWithIndex()
        marks = [row.offset for row, number in offsets.filter(lambda one: one[1] % step == step - 1).collect()]
    edges = [span.above, *(mark for mark in marks if mark < span.up_to), span.up_to]
    return [Span(low, high) for low, high in itertools.pairwise(edges) if high > low]


def _look(job: Job, replay: Replay) -> tuple[list[Segment], Span, tuple[str, ...]]:
    """The segments that hold it, the span of offsets, and the groups that will see it."""
    with job.place.connect() as database:
        known = manifest.segments(database)
        groups = [
            str(group)
            for (group,) in database.rows(
                f"SELECT consumer_group FROM {GROUPS} WHERE topic = %s ORDER BY consumer_group", (replay.target,)
            )
        ]
    archived = sorted({file.topic for segment in known for file in segment.files})
    if replay.topic not in archived:
        raise PipelineError(
            f"topic {replay.topic!r}: the archive has no message of it (its topics: {', '.join(archived) or 'none'})"
        )
    if replay.group:
        if replay.group not in groups:
            raise PipelineError(
                f"group {replay.group!r} is not registered for topic {replay.topic!r}: nobody would see the copies "
                f"(registered: {', '.join(groups) or 'none'})"
            )
        groups = [replay.group]
    chosen = [segment for segment in known if any(file.topic == replay.topic for file in segment.files)]
    ends = [(file.lo, file.hi) for segment in chosen for file in segment.files if file.topic == replay.topic]
    above = min((lo for lo, _ in ends), default=1) - 1
    up_to = max((hi for _, hi in ends), default=0)
    if isinstance(replay.since, int):
        above = max(above, replay.since - 1)
    if isinstance(replay.until, int):
        up_to = min(up_to, replay.until - 1)
    return chosen, Span(above, max(above, up_to)), tuple(groups)


def _originals(job: Job, replay: Replay, known: list[Segment], span: Span) -> DataFrame:
    from pyspark.errors import AnalysisException

    found = frames.archived(
        job.spark,
        job.root,
        known,
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
    """What was for one group alone goes to that group or nowhere, and not if it is a repeat.

    Repeats (dead letters that were sent back, copies of an earlier replay) stand in the topic of their originals: both
    would be handled.
    """
    from pyspark.sql import functions as F  # noqa: N812

    for_all = F.col("target_group") == ""
    if not replay.group:
        return for_all
    was_replayed = F.get_json_object("metadata", f"$.{CAME_FROM}.offset").isNotNull()
    return for_all | ((F.col("target_group") == replay.group) & (F.col("original_id") == "") & ~was_replayed)


def copies(originals: DataFrame, replay: Replay) -> DataFrame:
    """The rows for the sink: as the originals, with ids of this run, and where they are from in their metadata.

    Partitions stay as they were, those made by hashing too, and so does the order in each.
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
    # JSON's white space, which MariaDB and SQLite keep around an object.
    text = F.trim(F.col("metadata"), F.lit(JSON_SPACE))
    # Plain SQL may have stored what is no object; it counts as an empty one everywhere.
    inner = F.when(text.startswith("{"), F.substring(text, F.lit(2), F.length(text) - 2)).otherwise(F.lit(""))
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
