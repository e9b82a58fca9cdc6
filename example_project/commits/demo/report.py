"""The table of results that the demo prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from example_project.commits.demo.cleaning import queue_status
from example_project.commits.demo.run import GROUPS, LIVE_RATE, Run
from example_project.commits.demo.samples import GroupSamples
from example_project.commits.demo.verification import Expected, counts, duplicates, filtered, job_times
from example_project.commits.models import OrderViolation
from example_project.commits.tasks import COUNT_EVERY

NAME_WIDTH = 24
WIDTH = 14
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table, with one cell per group."""

    name: str
    cells: Sequence[str]
    is_bad: bool = False

    def __str__(self) -> str:
        return f"  {self.name:{NAME_WIDTH}}" + "".join(f"{cell:>{WIDTH}}" for cell in self.cells)


def rows(run: Run, expected: Expected) -> list[Row]:
    """Return the rows of the table, from the samples and the application's tables."""
    found = [run.samples.groups[group] for group in GROUPS]
    dead = {group["group"]: group["dead_letters"] for group in queue_status()["groups"]}
    violations = OrderViolation.objects.count()
    # order-check counts duplicates in its own table. For the other groups, the samples show them.
    repeats = [duplicates() if group == "order-check" else run.samples.groups[group].repeats for group in GROUPS]
    # There is one publisher, so events were published in offset order. This group handles each of them.
    first_of_burst = sorted(run.samples.groups["statistics"].first)[run.times.live_events]
    live = [_latencies(group, lambda offset: offset < first_of_burst) for group in found]
    burst = [_latencies(group, lambda offset: offset >= first_of_burst) for group in found]
    return [
        Row("", GROUPS),
        Row(
            "events handled",
            [f"{len(group.first):,}" for group in found],
            any(len(run.samples.groups[name].first) != number for name, number in expected.handled.items()),
        ),
        Row("passed by the filter", ["-", "-", f"{filtered():,}"]),
        Row("retries", [f"{group.retries:,}" for group in found]),
        Row("duplicates", [f"{count:,}" for count in repeats]),
        Row("order violations", ["-", f"{violations:,}", "-"], violations > 0),
        Row("dead letters", [f"{dead.get(group, 0):,}" for group in GROUPS]),
        *(Row(f"latency p{p}, live", [_duration(_percentile(values, p)) for values in live]) for p in PERCENTILES),
        *(Row(f"latency p{p}, burst", [_duration(_percentile(v, p)) for v in burst]) for p in PERCENTILES),
    ]


def rates(run: Run, expected: Expected) -> list[str]:
    """Return lines about the throughput of the burst and about how latency was measured."""
    times = run.times
    events = expected.total - times.live_events
    publishing = max(0.001, times.published_at - times.burst_from)
    handled_at = max(group.last_start for group in run.samples.groups.values()) / 1000
    handling = max(0.001, handled_at - times.burst_from)
    jobs, first_job, last_job = job_times()
    deliveries = sum(expected.handled.values()) - run.live_deliveries
    return [
        f"burst published  {events:9,} events     in {publishing:6.1f} s  {events / publishing:8,.0f} events/s",
        f"burst handled    {deliveries:9,} deliveries in {handling:6.1f} s  {deliveries / handling:8,.0f} deliveries/s",
        f"jobs             {jobs:9,} jobs       in {(last_job - first_job) / 1000:6.1f} s  summaries, then a ranking",
        f"recurring        {counts().count():9,} counts of the reviews, one every {COUNT_EVERY} s",
        "",
        f"live:    the first {times.live_events:,} events, published at {LIVE_RATE} per second",
        "burst:   the other events, published as fast as possible, so that latency is mostly time in the queue",
        "-:       not recorded by this group's handler; order-check checks the order of each key's events",
        "latency: from the insert into the outbox, just before the commit (the database's clock), to the start",
        "         of the first attempt (this machine's clock)",
    ]


def _latencies(group: GroupSamples, chosen: Callable[[int], bool]) -> list[int]:
    """Return sorted latencies in milliseconds of the events whose offset is chosen."""
    return sorted(max(0, started - created) for offset, (created, started) in group.first.items() if chosen(offset))


def _percentile(ordered: Sequence[int], percent: int) -> int | None:
    """Return the nearest-rank percentile: the smallest value that at least ``percent`` % of all do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else None


def _duration(milliseconds: int | None) -> str:
    if milliseconds is None:
        return "-"
    return f"{milliseconds} ms" if milliseconds < 10_000 else f"{milliseconds / 1000:.1f} s"
