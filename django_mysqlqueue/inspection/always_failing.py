"""Keys and tasks of which every attempt fails, while attempts at other messages of their group succeed.

Nothing is written for this. Only failures are recorded for certain, so successes of keys are found where they leave a
trace: a settled row above a message of the partition that waits, or a message that has failed and is no longer there.
Of tasks, results tell which jobs have ended lately, and how.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from django_mysqlqueue.db.tables import EVENTS, RESULTS, STATE
from django_mysqlqueue.inspection.error_kinds import FAILED as HAVE_FAILED
from django_mysqlqueue.inspection.error_kinds import Attempt, Unsettled, recorded_deliveries, unsettled
from django_mysqlqueue.inspection.tasks import EndedJob, ErrorLine, ended, failed_ones, last_errors
from django_mysqlqueue.models import DeliveryEvent
from django_mysqlqueue.names.rules import JOB_PREFIX
from django_mysqlqueue.service import job_results, messages
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.job_rows import FAILED, SUCCESSFUL
from django_mysqlqueue.service.log import publisher_keys
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql.session import Session, flat, grouped
from django_mysqlqueue.text.error_texts import is_attempt

Outcome = DeliveryEvent.Outcome
Failures = Mapping[int, Sequence[int]]
"""When attempts at messages of a key have failed, by offset."""
SETTLED = (Outcome.DEAD_LETTERED.value, Outcome.DELETED.value, Outcome.EXPIRED.value, Outcome.SUPERSEDED.value)
"""Outcomes that settle a message without success."""
MESSAGES = 200
"""Number of unsettled deliveries of a group that are read, latest due time first, and of its recorded dead letters."""
GROUPS = 20
"""Maximum number of groups that are read."""
CANDIDATES = 20
"""Maximum number of keys of a group whose attempts are read."""
ATTEMPTS = 20
"""Number of recorded deliveries of a message that are read, the newest ones."""
ROWS = 500
"""Number of rows of a partition in which successes are searched, the newest messages first. Those that were claimed and
not handled yet are above them."""
LEAST = 2
"""Minimum number of messages of a key. One alone may be a poison message, which is a problem of its own."""
SPAN_MS = 60_000
"""Milliseconds between the first and the last failure. A fault that is over sooner is none of the key or task: all
attempts of some seconds fail if what they call is restarted."""
APART_MS = 20_000
"""Milliseconds between the first failures of messages of a key, which are enough if no message of another key of the
group has failed since, and attempts have succeeded: then the fault is one of the key, and not of one time. Retries do
not count: of messages that were handled at one time, some may have succeeded.
"""

SCHEDULED = 2500
"""Number of scheduled messages among which jobs that wait for long are searched, of all topics together."""
ENDED = 1000
"""Number of the newest results of each status that are read, of all queues together."""
RECORDED = 1000
"""Number of the newest recorded deliveries of a group that are read."""


@dataclass(frozen=True, slots=True)
class AlwaysFailing:
    """Messages of a group that have failed, of the keys or tasks of which every attempt fails."""

    names: tuple[str, ...]
    """The publisher's keys, or the dotted paths of the tasks, the one with most messages first."""
    messages: Count
    """How many messages, or jobs, of those that were read."""
    failures: Count
    """How many attempts of these have failed since the last success of their key or task, as far as they are known."""
    since: int
    """When the first of these attempts failed."""
    error: str
    """The last line of the error of one of them."""
    waiting: Count
    """How many of the messages wait for another attempt."""
    recent: int
    """How many of them wait, or were dead-lettered within the window of the overview."""
    offsets: tuple[int, ...] = ()
    """Those of them that wait in the log."""
    are_tasks: bool = False
    """Whether the names are those of tasks."""
    others: int = 0
    """How many attempts of the other messages that were read have failed."""


# -- keys ---------------------------------------------------------------------


def find_keys(
    session: Session,
    started: Mapping[GroupRef, int],
    *,
    least: int,
    recent: int,
    acked: Mapping[GroupRef, int],
) -> dict[GroupRef, AlwaysFailing]:
    """Return the first ``GROUPS`` groups that have keys of which every attempt since ``started`` fails.

    ``acked``: the end of the newest minute in which an attempt of a group has succeeded, in epoch milliseconds.
    """
    found: dict[GroupRef, AlwaysFailing] = {}
    for ref, at in list(started.items())[:GROUPS]:
        those, is_whole = failing(session, ref)
        by_key = _by_key(session, those, least)
        if not by_key:
            continue
        recorded = recorded_deliveries(session, [ref], RECORDED).get(ref, [])
        dead = _dead_lettered(session, recorded)
        often = _often(session, ref, by_key, dead, recorded, after=at, least=least)
        lasting = {key: times for key, (times, _) in often.items() if _span(flat(times.values())) >= SPAN_MS}
        failures = lasting | {key: times for key, (times, first) in often.items() if _span(first) >= APART_MS}
        if failures and not _is_apart(session, failures, recorded, acked.get(ref, 0)):
            failures = lasting
        if failures:
            keys = sorted(failures, key=lambda key: (-len(failures[key]), key))
            chosen = [one for key in keys for one in by_key[key]]
            ended = [one for key in keys for one in dead.get(key, ()) if one.offset in failures[key]]
            times = [at for of_key in failures.values() for failed in of_key.values() for at in failed]
            since = min(times)
            others = sum(one.attempts for one in those) - sum(one.attempts for one in chosen)
            others += sum(one.attempt for key in dead.keys() - failures for one in dead[key] if one.at > since)
            found[ref] = AlwaysFailing(
                names=tuple(keys),
                messages=Count(len(chosen) + len(ended), is_whole),
                failures=Count(len(times), is_whole),
                since=since,
                error=messages.last_line(chosen[0].end),
                waiting=Count(len(chosen), is_whole),
                recent=len(chosen) + sum(one.at >= recent for one in ended),
                offsets=tuple(one.offset for one in chosen),
                others=others,
            )
    return found


def _span(times: Sequence[int]) -> int:
    return max(times, default=0) - min(times, default=0)


def _is_apart(
    session: Session, failures: Mapping[str, Failures], recorded: Iterable[Attempt], acked_until: int
) -> bool:
    """Return whether attempts of the group have succeeded, and none at messages of other keys has failed, since."""
    since = min(at for failed in failures.values() for times in failed.values() for at in times)
    known = {offset for failed in failures.values() for offset in failed}
    lately = (one for one in recorded if one.at >= since and one.outcome in HAVE_FAILED)
    others = {one.offset: one.key for one in lately if one.offset not in known}
    return acked_until > since and all(key in failures for key in publisher_keys(session, others).values())


def failing(session: Session, ref: GroupRef) -> tuple[list[Unsettled], bool]:
    """Return messages of a group that have failed and are not settled, and whether these are all."""
    read = unsettled(session, [ref], MESSAGES).get(ref, [])
    return [one for one in read if one.attempts and one.end], len(read) < MESSAGES


def _by_key(session: Session, failing: Sequence[Unsettled], least: int) -> dict[str, list[Unsettled]]:
    """Return the messages of keys that may have failed often enough, those with most failures first."""
    if len(failing) < LEAST or sum(one.attempts for one in failing) < least:
        return {}
    keys = publisher_keys(session, {one.offset: one.key for one in failing})
    # A message without a key, or that was deleted, has none in common with others.
    found = grouped((key, one) for one in failing if (key := keys[one.offset]) is not None)
    attempts = {key: sum(one.attempts for one in those) for key, those in found.items() if len(those) >= LEAST}
    often = sorted((key for key in attempts if attempts[key] >= least), key=lambda key: (-attempts[key], key))
    return {key: found[key] for key in often[:CANDIDATES]}


def _dead_lettered(session: Session, recorded: Iterable[Attempt]) -> dict[str | None, list[Attempt]]:
    """Return the last attempts at messages that were dead-lettered, by publisher's key."""
    those = [one for one in recorded if one.outcome == Outcome.DEAD_LETTERED and is_attempt(one.start)][:MESSAGES]
    keys = publisher_keys(session, {one.offset: one.key for one in those})
    return grouped((keys[one.offset], one) for one in those)


def _often(
    session: Session,
    ref: GroupRef,
    by_key: Mapping[str, Sequence[Unsettled]],
    dead: Mapping[str | None, Sequence[Attempt]],
    recorded: Sequence[Attempt],
    *,
    after: int,
    least: int,
) -> dict[str, tuple[Failures, list[int]]]:
    """Return when attempts failed after the last success of their key, if often, and when new messages did first.

    Messages that were dead-lettered count if others of their key still fail.
    """
    tried = {
        key: [*(one.offset for one in those), *(one.offset for one in dead.get(key, ()))]
        for key, those in by_key.items()
    }
    times = failed_at(session, ref, [offset for offsets in tried.values() for offset in offsets])
    succeeded = _succeeded_at(session, ref, {one.key for those in by_key.values() for one in those}, recorded)
    found: dict[str, tuple[Failures, list[int]]] = {}
    for key, those in by_key.items():
        if not succeeded.is_known(key, those):
            continue
        begin = max(after, succeeded.at.get(key, 0))
        of_messages = {
            offset: failed for offset in tried[key] if (failed := [at for at in times.get(offset, ()) if at > begin])
        }
        if len(of_messages) >= LEAST and sum(map(len, of_messages.values())) >= least:
            first = [min(failed) for offset, failed in of_messages.items() if min(times[offset]) > begin]
            found[key] = of_messages, first
    return found


def failed_at(session: Session, ref: GroupRef, offsets: Sequence[int]) -> dict[int, list[int]]:
    """Return when attempts at messages failed, as far as the history of deliveries has it."""
    select = (
        "SELECT message_offset, consumer_group, topic, outcome, settled_at "
        f"FROM {EVENTS}{session.dialect.force_index('queue_delivery_events_message')} "
        "WHERE message_offset = %s ORDER BY id DESC LIMIT %s"
    )
    rows = session.each(select, [(offset, ATTEMPTS) for offset in offsets])
    return grouped((offset, at) for offset, *of, outcome, at in rows if (*of,) == ref and outcome in HAVE_FAILED)


@dataclass(frozen=True, slots=True)
class _Successes:
    """Successes by publisher's key, as far as they are known."""

    at: Mapping[str, int]
    """When an attempt has succeeded, or begun and then succeeded, in epoch milliseconds."""
    failing: Set[str]
    """The keys of rows that were read and have failed."""
    down_to: Mapping[str, int]
    """The lowest offset that was read in partitions that have more rows."""

    def is_known(self, key: str, failing: Sequence[Unsettled]) -> bool:
        """Return whether rows were read down to a failing message of a key, in each of its partitions."""
        highest: dict[str, int] = {}
        for one in failing:
            highest[one.key] = max(one.offset, highest.get(one.key, 0))
        return key in self.failing or all(offset >= self.down_to.get(name, 0) for name, offset in highest.items())


def _succeeded_at(
    session: Session, ref: GroupRef, partitions: Iterable[str], recorded: Iterable[Attempt]
) -> _Successes:
    """Return when attempts of keys have succeeded: the newest rows of partitions tell, and recorded deliveries."""
    select = (
        "SELECT partition_key, message_offset, acked, delivery_token, delivered_at, retry_count "
        f"FROM {STATE}{session.dialect.force_index('PRIMARY')} "
        "WHERE consumer_group = %s AND topic = %s AND partition_key = %s ORDER BY message_offset DESC LIMIT %s"
    )
    wanted = sorted(partitions)
    places: dict[int, tuple[str, int]] = {}
    failed: dict[int, str] = {}
    read: defaultdict[str, list[int]] = defaultdict(list)
    for key, offset, acked, token, at, attempts in session.each(select, [(*ref, key, ROWS) for key in wanted]):
        read[key].append(offset)
        if acked and token:  # A dead letter has no token.
            places[offset] = (key, at)
        elif attempts and not acked:
            failed[offset] = key
    places |= _recorded(session, ref, wanted, recorded)
    down_to = {key: min(offsets) for key, offsets in read.items() if len(offsets) >= ROWS}
    # The rows of other partitions are read as a whole.
    failed = {offset: key for offset, key in failed.items() if key in down_to}
    keys = publisher_keys(session, {offset: key for offset, (key, _) in places.items()} | failed)
    found: dict[str, int] = {}
    for offset, (_, at) in places.items():
        key = keys[offset]
        if key is not None:
            found[key] = max(at, found.get(key, 0))
    return _Successes(found, {key for offset in failed if (key := keys[offset]) is not None}, down_to)


def _recorded(
    session: Session, ref: GroupRef, partitions: Sequence[str], recorded: Iterable[Attempt]
) -> dict[int, tuple[str, int]]:
    """Return messages that were acked, or have failed and are gone: partition, and when they were acked, or failed."""
    wanted, settled = set(partitions), set()
    found: dict[int, tuple[str, int]] = {}
    failed: dict[int, tuple[str, int]] = {}
    for one in recorded:
        if one.outcome in SETTLED:
            settled.add(one.offset)
        elif one.key in wanted and one.outcome == Outcome.ACKED:
            found.setdefault(one.offset, (one.key, one.at))
        elif one.key in wanted and one.outcome == Outcome.FAILED and one.offset not in settled:
            failed.setdefault(one.offset, (one.key, one.at))
    rows = session.joined(
        "SELECT s.message_offset",
        "ko",
        [(key, offset) for offset, (key, _) in failed.items()],
        f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW}",
        after=ref,
    )
    there = {offset for (offset,) in rows}
    return {offset: place for offset, place in failed.items() if offset not in there} | found


# -- tasks --------------------------------------------------------------------


_SucceededAt = defaultdict[tuple[str, str], int]
"""By queue and task, the time after which certainly no job has succeeded."""


@dataclass(slots=True)
class _Failures:
    """The failures of a task."""

    jobs: set[object] = field(default_factory=set)
    """The offset of a message for a job that waits, or the id of one that has ended."""
    times: list[int] = field(default_factory=list)
    ended_at: list[int] = field(default_factory=list)
    """When those that have ended did."""
    ended: str = ""
    """The id of the newest that has ended."""
    error: str = ""
    """The end of the error of one that waits."""
    moved: str = ""
    """The id of one that waits for long."""

    def is_task(self, least: int, recent: int) -> bool:
        """Return whether the task itself seems to fail: several of its jobs, often, for long enough, and still."""
        if len(self.jobs) < LEAST or len(self.times) < least:
            return False
        last = max(self.times)
        return last - min(self.times) >= SPAN_MS and (last >= recent or bool(self.error or self.moved))


def find_tasks(
    session: Session, started: Mapping[GroupRef, int], *, least: int, recent: int
) -> dict[GroupRef, AlwaysFailing]:
    """Return the first ``GROUPS`` queues that have tasks of which every attempt since ``started`` fails."""
    if not started:
        return {}
    first = min(started.values())
    good, bad = (ended(session, status, first, ENDED) for status in (SUCCESSFUL, FAILED))
    known_from = good[-1].at if len(good) >= ENDED else 0
    succeeded = defaultdict(lambda: known_from, {(one.queue, one.task): one.at for one in reversed(good)})
    moved, is_read = _moved(session, started)
    refs = list(started)[:GROUPS]
    recorded = recorded_deliveries(session, refs, RECORDED)
    found = {}
    for ref in refs:
        begin, attempts = started[ref], recorded.get(ref, [])
        of_task: defaultdict[str, _Failures] = defaultdict(_Failures)
        _add(of_task, ref, [one for one in bad if one.last_attempted_at and one.at > begin], succeeded)
        is_whole = _add_waiting(session, of_task, ref, begin, succeeded) and is_read
        _add(of_task, ref, [one for one in moved if one.at > begin], succeeded)
        _add_recorded(of_task, ref, [one for one in attempts if one.at > begin], succeeded)
        chosen = {task: failures for task, failures in of_task.items() if failures.is_task(least, recent)}
        if chosen:
            exact = is_whole and len(bad) < ENDED
            all_recorded = len(attempts) < RECORDED or attempts[-1].at <= begin
            found[ref] = _summary(session, chosen, recent, exact=exact, all_recorded=all_recorded)
    return found


def _add(of_task: Mapping[str, _Failures], ref: GroupRef, jobs: Iterable[EndedJob], succeeded: _SucceededAt) -> None:
    """Add the last failures of jobs of a queue since the last success of their task."""
    queue = ref.topic.removeprefix(JOB_PREFIX)
    for one in jobs:
        if one.queue == queue and one.at > succeeded[queue, one.task]:
            failures = of_task[one.task]
            failures.jobs.add(one.id)
            failures.times.append(one.at)
            if one.last_attempted_at:
                failures.ended_at.append(one.at)
                failures.ended = failures.ended or one.id
            else:
                failures.moved = failures.moved or one.id


def _add_waiting(
    session: Session, of_task: Mapping[str, _Failures], ref: GroupRef, begin: int, succeeded: _SucceededAt
) -> bool:
    """Add the failed attempts of jobs that wait for another one; return whether all of these jobs were read."""
    queue = ref.topic.removeprefix(JOB_PREFIX)
    waiting, is_whole = failing(session, ref)
    times = failed_at(session, ref, [one.offset for one in waiting])
    for one in waiting:
        task = job_results.task_of(ref, one.key)
        since = max(begin, succeeded[queue, task])
        if failed := [at for at in times.get(one.offset, ()) if at > since]:
            failures = of_task[task]
            failures.jobs.add(one.offset)
            failures.times += failed
            failures.error = failures.error or messages.last_line(one.end)
    return is_whole


def _moved(session: Session, refs: Collection[GroupRef]) -> tuple[list[EndedJob], bool]:
    """Return jobs of queues that wait for long, as if they had ended with their last attempts, and if these are all."""
    topics = {ref.topic for ref in refs}
    jobs, is_whole = failed_ones(session, most=SCHEDULED)
    select = "SELECT s.task_path, s.queue_name, s.last_attempted_at, s.id"
    joins = f"{session.dialect.join_to(RESULTS, 's')} ON s.id = v.i"
    rows = session.joined(select, "i", [one.id for one in jobs if one.topic in topics], joins)
    return [EndedJob(*row) for row in rows], is_whole


def _add_recorded(
    of_task: Mapping[str, _Failures], ref: GroupRef, attempts: Iterable[Attempt], succeeded: _SucceededAt
) -> None:
    """Add the failed attempts of jobs that have ended or been moved: of these, only the last one was known."""
    queue = ref.topic.removeprefix(JOB_PREFIX)
    those = ((job_results.task_of(ref, one.key), one) for one in attempts if one.outcome in HAVE_FAILED)
    times = grouped((task, one.at) for task, one in those if is_attempt(one.start) and one.at > succeeded[queue, task])
    for task, failures in of_task.items():
        failures.times = max(failures.times, times.get(task, []), key=len)


def _summary(
    session: Session, chosen: Mapping[str, _Failures], recent: int, *, exact: bool, all_recorded: bool
) -> AlwaysFailing:
    number = sum(len(one.jobs) for one in chosen.values())
    ended_at = [at for one in chosen.values() for at in one.ended_at]
    tasks = sorted(chosen, key=lambda task: (-len(chosen[task].jobs), task))
    first = chosen[tasks[0]]
    job = first.ended or ("" if first.error else first.moved)
    return AlwaysFailing(
        names=tuple(tasks),
        messages=Count(number, exact),
        failures=Count(sum(len(one.times) for one in chosen.values()), exact and all_recorded),
        since=min(at for one in chosen.values() for at in one.times),
        error=last_errors(session, [job]).get(job, ErrorLine()).text if job else first.error,
        waiting=Count(number - len(ended_at), exact),
        recent=number - sum(at < recent for at in ended_at),
        offsets=tuple(job for one in chosen.values() for job in one.jobs if isinstance(job, int)),
        are_tasks=True,
    )
