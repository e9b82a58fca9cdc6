"""Problems of a consumer group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_mysqlqueue.inspection.always_failing import AlwaysFailing
from django_mysqlqueue.inspection.beginnings import NOTHING, Began, Ended, Failed, Past, Rule, Run, continuing
from django_mysqlqueue.inspection.bounds import StallTimes
from django_mysqlqueue.inspection.overview import GroupOverview
from django_mysqlqueue.inspection.partitions import HeadMessage
from django_mysqlqueue.inspection.problem import NONE, Operation, Problem, age, first_names, most_frequent, waiting
from django_mysqlqueue.inspection.trends import SHORTEST_DRAIN, current_rates, drain_of
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.names.keys import lane_of
from django_mysqlqueue.options.conf import HealthSettings, get_settings
from django_mysqlqueue.options.topics import dlq_topic, is_dlq
from django_mysqlqueue.service import groups, rollups
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.messages import last_line
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.rollups import Bucket
from django_mysqlqueue.service.subsets import EVERYTHING
from django_mysqlqueue.subscriptions.effective import blocks_on_failure
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.text.humanize import clock_text, duration, messages_per_second, partition_text, task_name

BACKLOG = 100
"""Number of waiting messages below which nobody is told how fast they are settled."""
GROWING = 120.0
"""Seconds for which a backlog must have grown to be a problem."""
RESTART = 45.0
"""Seconds after its lease within which a supervisor must have replaced a process that died: its longest pause, and a
start."""


@dataclass(frozen=True, slots=True)
class Attempts:
    """The attempts of a group that ended within a window of some seconds, and when too many of them fail."""

    ended: Ended
    thresholds: HealthSettings
    window: float
    past: Past | None = None
    """Earlier attempts; None: they are not known."""
    explained: int = 0
    """Number of messages that fail because of their key, or of their task."""
    tasks: AlwaysFailing | None = None
    """The tasks of which every attempt fails, if the group is a queue of jobs."""


def progress(
    group: GroupOverview,
    handler: Handler | None,
    now: int,
    times: StallTimes,
    *,
    moves: bool,
    began: Began = NOTHING,
    failed_first: Mapping[Failed, int] | None = None,
) -> Iterator[Problem]:
    """Yield why messages of a group wait; ``moves``: whether a delivery has ended within ``times.still``."""
    ref, oldest_at, lag = group.ref, group.oldest_at, waiting(group.waiting_messages)
    waits = age(now, oldest_at)
    all_wait = partial(Problem, ref=ref, since=oldest_at, oldest_at=oldest_at, messages=group.waiting_messages)
    unfinished = groups.unfinished(group.after_seek)
    if isinstance(group.filter, str):
        text = _(
            "Subscribers of this release claim nothing for %(ref)s, because they cannot parse its filter: %(error)s. "
            "%(lag)s."
        )
        values = {"ref": ref, "error": group.filter, "lag": lag}
        is_late = waits >= times.stuck and not (group.paused or unfinished)
        yield all_wait(0 if is_late else 2, "filter", text % values, is_private=True)
    if handler is not None and handler.mode != group.mode:
        # Subscribers with other code of the project may still work.
        severity = 0 if group.has_work and not group.live else 1
        text = _(
            "%(ref)s is registered as %(registered)s, but %(where)s has mode=%(mode)s: subscribers with this code do "
            "not start."
        )
        values = {"ref": ref, "registered": group.mode, "where": handler.where, "mode": repr(handler.mode)}
        yield all_wait(severity, "mode", text % values)
    yield from paused_tasks(group)
    if unfinished == "drop":
        yield all_wait(0, "drop_ended_early", _("A drop of %(ref)s has not finished.") % {"ref": ref})
    elif unfinished == "move":
        text = _("%(ref)s waits until it has settled all messages in the database that its topic leaves; %(lag)s.")
        yield all_wait(2, "moves", text % {"ref": ref, "lag": lag})
    elif unfinished:
        yield all_wait(0, "seek_ended_early", _("A seek of %(ref)s has not finished.") % {"ref": ref})
    elif group.paused:
        text = _("%(ref)s is paused; %(lag)s.") % {"ref": ref, "lag": lag}
        yield all_wait(1 if group.has_work else 2, "paused", text, since=began.paused_at)
    elif group.has_work and not group.live:
        text = _("No live subscribers for %(ref)s; %(lag)s, the oldest for %(age)s.")
        advice = ""
        if not began.had_subscribers:
            text += " " + _("GC keeps all messages for the group.")
            advice = _("Start a subscriber, or drop the group if it is no longer needed.")
        values = {"ref": ref, "lag": lag, "age": duration(waits)}
        yield all_wait(
            0 if waits >= times.stuck else 2,  # They may be restarting.
            "no_subscriber",
            text % values,
            since=began.served_until,
            advice=restarting_text(group, now) or advice,
        )
    elif group.live:
        yield from _broken(group)
        found = [*_stuck(group, handler, now, times, failed_first or {}), *_unserved(group, now, times)]
        yield from found
        if group.limited and group.has_work:
            yield _limited(group)
        is_explained = isinstance(group.filter, str) or (group.limited and group.limited.by_rate)
        if not (found or moves or is_explained) and group.uptime(now) >= times.still:
            yield from _still(group, now, times)


def speed(group: GroupOverview, recent: Sequence[Bucket], now: int) -> Iterator[Problem]:
    """Yield that a backlog grows, or that it needs long to be settled, from the rows of minutes of the rates.

    A long backlog grows if it does since the last look and since one of some minutes ago: it is not that a batch came.
    """
    drain = drain_of(group, recent, now)
    is_soon = drain is not None and drain < SHORTEST_DRAIN and not group.lag_is_bound
    if drain is None or is_soon or group.lag.value < BACKLOG or group.oldest_at is None:
        return
    of_group = partial(Problem, ref=group.ref, oldest_at=group.oldest_at, messages=group.waiting_messages)
    values = {
        "ref": group.ref,
        "lag": waiting(group.waiting_messages),
        "age": duration(age(now, group.oldest_at)),
    }
    if drain < float("inf"):
        needs = _("more than %(time)s") if group.lag_is_bound else _("about %(time)s")
        text = _("%(ref)s catches up: %(lag)s, the oldest for %(age)s. At its present speed, it needs %(needs)s.")
        yield of_group(2, "catching_up", text % {**values, "needs": needs % {"time": duration(drain)}})
    elif drain_of(group, recent, now, shortest=GROWING) == float("inf"):
        rates = current_rates(rollups.summed(recent), now, registered_at=group.registered_at)
        text = _("%(ref)s falls behind: %(lag)s, the oldest for %(age)s. It settles %(out)s a second; more come in.")
        yield of_group(1, "behind", text % {**values, "out": messages_per_second(rates.settled)})


def restarting_text(group: GroupOverview, now: int) -> str:
    """Return the advice that a supervisor, which cannot say it, will start a process again; empty if none will."""
    for row in group.subscribers:
        silent = age(now, row.heartbeat_at) - get_settings().lease_duration
        if not row.live and row.info.get("supervised") and silent < RESTART:
            text = _(
                "Wait: the supervisor on %(host)s starts a process again within 30 s. Check why the last one died."
            )
            return text % {"host": row.info.get("host", "")}
    return ""


def failures(
    group: GroupOverview, handler: Handler | None, attempts: Attempts, times: StallTimes, now: int
) -> Iterator[Problem]:
    """Yield problems of failing handlers: their share of failed attempts, and their dead letters."""
    ref, ended, most = group.ref, attempts.ended, attempts.thresholds.max_recent_dead_letters
    # The log's count is exact and current, unless the DLQ topic is too long: then use the subscribers' counts.
    recent = group.recent_dead_letters
    if not recent.exact:
        recent = Count(max(recent.value, ended.dead_lettered), exact=False)
    run = failing(group, ended, attempts.thresholds, times, now)
    # If nothing is left of what has failed, the failures are over, even if the newest counts do not tell.
    if run is not None and (group.retrying or group.in_flight or recent or not recent.exact):
        harmed = group.retrying + recent
        yield from _failing(group, attempts, now, run, harmed, harmed.value + _held_up(group, handler))
    advice = ""
    if _still_fails(group, attempts, now):
        advice = _("Fix the cause first: most of the newest attempts failed, and redriven messages would fail, too.")
    if most is not None and recent.value > most:
        text = _("%(ref)s dead-lettered %(number)s messages in the last %(window)s (limit %(limit)s).")
        values = {"ref": ref, "number": str(recent), "window": duration(attempts.window), "limit": f"{most:,}"}
        since = None if attempts.past is None else attempts.past.dead_since
        yield Problem(0, "recent_dead_letters", text % values, ref, since=since, advice=advice, failed=recent)
    if group.dead_letters:
        text = _("%(ref)s has dead-lettered messages: %(number)s in %(topic)s.")
        values = {"ref": ref, "number": str(group.dead_letters), "topic": dlq_topic(ref.topic)}
        severity = 1 if recent or not recent.exact else 2
        yield Problem(severity, "dead_letters", text % values, ref, advice=advice, failed=recent or group.dead_letters)


def _still_fails(group: GroupOverview, attempts: Attempts, now: int) -> bool:
    """Return whether too many attempts of the newest minute that has any have failed, of present subscribers.

    This is known before there are enough of them for ``failing``.
    """
    minutes = attempts.ended.since(now - int(group.uptime(now) * 1000)).buckets
    newest = next((one for one in reversed(minutes) if one.attempts), None)
    return newest is not None and rule_of(attempts.thresholds).is_over(newest.failures, newest.attempts)


def failing(group: GroupOverview, ended: Ended, thresholds: HealthSettings, times: StallTimes, now: int) -> Run | None:
    """Return the failures that continue, of attempts of its present subscribers: earlier ones are of other code."""
    uptime = group.uptime(now)
    if uptime < times.started:
        return None
    return continuing(ended.since(now - int(uptime * 1000)).buckets, rule_of(thresholds))


def rule_of(thresholds: HealthSettings) -> Rule:
    """Return when attempts fail too often."""
    share = thresholds.max_failure_ratio
    return Rule(1.0 if share is None else share, thresholds.min_attempts)


def _failing(
    group: GroupOverview, attempts: Attempts, now: int, run: Run, harmed: Count, messages: int
) -> Iterator[Problem]:
    ref, rule = group.ref, rule_of(attempts.thresholds)
    ended, past, window = attempts.ended, attempts.past, attempts.window
    since, acked = None if run.is_first else run.since, ended.acked
    if past is not None:
        if past.since is None:
            return  # Successes of before the window are among the newest attempts.
        # Of a window that ends with the newest attempt: that successes get older must not make a difference. The
        # newest minute may have nothing but a sample of the backlog.
        newest = max(one.at for one in ended.buckets if one.attempts)
        since, begin = past.since, newest - int(window * 1000)
        acked = sum(one.acked for one in past.minutes if one.at > begin)
    # A few failed attempts may all be of one message, so they are only for information.
    judged = rule.share < 1 and ended.attempts >= rule.newest
    others = messages - attempts.explained
    # The newest attempts may be those at a few messages that are tried again and again, after many have succeeded.
    if acked and not (judged and (others >= rule.newest or rule.is_over(others, others + acked))):
        return
    # One message that is tried again and again does not make an outage.
    severity = 0 if acked or (judged and (messages > 1 or not harmed.exact)) else 1
    text, every = _share_text(ref, attempts, run.since if since is None else since, now, is_begin=since is not None)
    advice, operation = _step(group, every=every)
    found = Problem(
        severity,
        "failing",
        text,
        ref,
        since=since,
        advice=advice,
        operation=operation,
        messages=group.waiting_messages if every else NONE,
        error=most_frequent(last_line(head.last_error) for head in group.heads),
        failed=harmed,
    )
    if not acked and (tasks := attempts.tasks) is not None:
        found = replace(found, text=_tasks_text(ref, tasks, now), task=tasks.names[0], error=tasks.error)
    yield found


def _step(group: GroupOverview, *, every: bool) -> tuple[str, Operation]:
    """Return the next step, and its operation, if it is not that of the kind: to pause the group."""
    if group.paused:
        return _("Fix the cause, then resume the group."), "resume"
    if not group.has_work:  # Nothing is left to pause if all messages are in the DLQ.
        return _("Fix the cause, then redrive the dead letters."), ""
    if not every:
        return _("Find out what fails, and fix it. Pausing the group would stop the messages that succeed, too."), ""
    return "", ""


def _share_text(ref: GroupRef, attempts: Attempts, since: int, now: int, *, is_begin: bool) -> tuple[str, bool]:
    """Return which share of the attempts since a time has failed, and whether all have after its minute."""
    of_run = (attempts.ended if attempts.past is None else Ended(attempts.past.minutes)).since(since)
    later = Ended([one for one in of_run.buckets if one.at > since])
    every = not (later if later.failed else of_run).acked
    if every:
        text = _("%(ref)s: every attempt has failed %(when)s (%(number)s of %(number)s).")
    else:
        text = _("%(ref)s: %(number)s of %(attempts)s attempts have failed %(when)s (limit %(share)s).")
    return text % {
        "ref": ref,
        "number": f"{of_run.failed:,}",
        "attempts": f"{of_run.attempts:,}",
        "when": _("since %(time)s") % {"time": clock_text(since, now)}
        if is_begin
        else _("in the last %(window)s") % {"window": duration(attempts.window)},
        "share": f"{rule_of(attempts.thresholds).share:.0%}",
    }, every


def _held_up(group: GroupOverview, handler: Handler | None) -> int:
    """Return how many messages, at least, are being tried again, or wait for one that has failed."""
    blocks = blocks_on_failure(group.mode, handler)
    number = 0
    for head in group.heads:
        if head.attempts and head.last_error:
            number += bool(head.delivered_by)
            number += max(0, group.backlog_of(head.key).value - 1) if blocks else 0
    return number


def retrying(ref: GroupRef, found: AlwaysFailing, thresholds: HealthSettings, now: int) -> Problem:
    """Return that every attempt at the messages of some keys, or at the jobs of some tasks, fails."""
    problem = Problem(
        0 if rule_of(thresholds).share < 1 else 1,
        "retrying",
        _tasks_text(ref, found, now) if found.are_tasks else _keys_text(ref, found, now),
        ref,
        since=found.since,
        messages=found.waiting,
        offsets=frozenset(found.offsets),
        error=found.error,
        failed=found.messages,
    )
    if not found.are_tasks:
        return replace(problem, key=found.names[0])
    advice = _("Fix the task or what it calls, then redrive its dead letters.")
    return replace(problem, task=found.names[0], advice=advice)


def _keys_text(ref: GroupRef, found: AlwaysFailing, now: int) -> str:
    text = ngettext(
        "%(failures)s of %(all)s failures of %(ref)s since %(time)s have the key %(keys)s, of which all attempts fail.",
        "%(failures)s of %(all)s failures of %(ref)s since %(time)s have the keys %(keys)s, of which all attempts "
        "fail.",
        len(found.names),
    )
    return text % {
        "ref": ref,
        "keys": first_names(map(repr, found.names)),
        "time": clock_text(found.since, now),
        "failures": str(found.failures),
        "all": str(found.failures + Count(found.others)),
    }


def _tasks_text(ref: GroupRef, found: AlwaysFailing, now: int) -> str:
    text = _(
        "%(names)s: every attempt has failed since %(time)s (%(failures)s failures of %(number)s jobs of %(ref)s)."
    )
    return text % {
        "names": first_names(map(task_name, found.names)),
        "time": clock_text(found.since, now),
        "failures": str(found.failures),
        "number": str(found.messages),
        "ref": ref,
    }


def paused_tasks(group: GroupOverview) -> Iterator[Problem]:
    """Yield the tasks of a queue of jobs that are paused."""
    for task, since in group.paused_tasks.items():
        waits = [group.backlog_of(key) for key in group.head_backlogs if lane_of(key).partition == task]
        messages = sum(waits, Count(0, group.lag.exact))
        text = _("%(task)s is paused in %(topic)s; %(lag)s.")
        text %= {"task": task_name(task), "topic": group.ref.topic, "lag": waiting(messages)}
        severity = 1 if messages else 2
        yield Problem(severity, "paused_task", text, group.ref, task, since=since, task=task, messages=messages)


def stuck_heads(group: GroupOverview, now: int, times: StallTimes) -> list[HeadMessage]:
    """Return the first messages of partitions that have been attempted and have waited for long."""
    if group.paused or not group.live:
        return []
    return [
        head
        for head in group.moving_heads
        if head.attempts and age(now, group.waiting_since(head.published_at)) >= times.stuck
    ]


def _broken(group: GroupOverview) -> Iterator[Problem]:
    """Yield live subscribers that cannot work for the group because of a bug."""
    severity = 0 if group.has_work and all(row.error for row in group.live) else 1
    for row in group.live:
        if row.error:
            text = _("Subscriber %(name)s cannot work for %(ref)s because of a bug in the queue.")
            text %= {"name": row.name, "ref": group.ref}
            since = row.info.get("error_at")
            yield Problem(
                severity, "broken", text, group.ref, subscriber=row.name, error=row.error, since=since, is_private=True
            )


def _stuck(
    group: GroupOverview, handler: Handler | None, now: int, times: StallTimes, failed_first: Mapping[Failed, int]
) -> Iterator[Problem]:
    """Yield messages that fail repeatedly, and those whose subscribers were lost: others may wait for them."""
    ordered = group.mode == ConsumerGroup.Mode.ORDERED
    live = {row.name for row in group.live}
    for head in stuck_heads(group, now, times):
        began = group.waiting_since(head.published_at)
        # The start of a suspected poison message counts as an attempt. Its handler has not failed.
        is_lost = not head.last_error
        blocks = ordered if is_lost else blocks_on_failure(group.mode, handler)
        if is_lost and blocks:
            text = _(
                "Partition %(key)s of %(ref)s waits for message %(offset)s, whose subscriber was lost. It has waited "
                "for %(age)s."
            )
        elif is_lost:
            text = _("The subscriber of message %(offset)s of %(ref)s was lost. The message has waited for %(age)s.")
        elif blocks:
            text = _(
                "Partition %(key)s of %(ref)s waits for message %(offset)s, which has failed %(times)s. It has "
                "waited for %(age)s."
            )
        else:
            text = _("Message %(offset)s of %(ref)s has failed %(times)s and has waited for %(age)s.")
        failures = ngettext("once", "%(number)s times", head.attempts) % {"number": head.attempts}
        values = {
            "key": partition_text(*lane_of(head.key), quoted=True),
            "ref": group.ref,
            "offset": head.offset,
            "times": failures,
            "age": duration(age(now, began)),
        }
        advice = ""
        operation: Operation = ""
        if is_dlq(group.ref.topic):
            advice = _("Fix the cause, then retry the message now, or discard it: a DLQ topic has no DLQ.")
            operation = "" if is_lost else "retry"
        if is_lost and head.delivered_by in live:
            advice = _("Wait until the attempt in flight has ended.")
        elif is_lost:
            advice = _("Check the log of the lost subscriber: did the message end its process?")
        yield Problem(
            2 if blocks is False or (is_lost and head.delivered_by in live) else 1,
            "stuck",
            text % values,
            group.ref,
            head.key,
            head.offset,
            since=failed_first.get(Failed(group.ref, head.offset)),
            oldest_at=began,
            messages=group.backlog_of(head.key) if blocks else Count(1),
            error=last_line(head.last_error),
            advice=advice,
            operation=operation,
        )


def _limited(group: GroupOverview) -> Problem:
    """Return that messages of a group wait because its limits are reached."""
    values = {"ref": group.ref, "limits": group.limits.text, "lag": waiting(group.waiting_messages)}
    if group.limited is not None and group.limited.keys and not group.limited.group:
        keys = group.limited.keys
        values["keys"] = f"{keys:,}" if group.limited.exact else f"{keys:,}+"
        text = ngettext(
            "%(ref)s is limited to %(limits)s; %(keys)s key is at its limit; %(lag)s.",
            "%(ref)s is limited to %(limits)s; %(keys)s keys are at their limit; %(lag)s.",
            keys,
        )
    else:
        text = _("%(ref)s is limited to %(limits)s; %(lag)s.")
    return Problem(2, "limited", text % values, group.ref, oldest_at=group.oldest_at, messages=group.waiting_messages)


def _still(group: GroupOverview, now: int, times: StallTimes) -> Iterator[Problem]:
    """Yield a group with live subscribers if no delivery ends: its handlers or subscribers hang."""
    for head in group.moving_heads:
        since = group.waiting_since(head.published_at)
        waits = age(now, since)
        # Messages in backoff or snoozed are not stalled.
        if waits >= times.still and (head.delivered_by or head.invisible_until <= now):
            text = _(
                "%(ref)s is stalled: it has live subscribers, but no delivery has ended in the last %(window)s; "
                "%(lag)s, one of them for %(age)s."
            )
            values = {"window": duration(times.still), "lag": waiting(group.lag), "age": duration(waits)}
            text %= {"ref": group.ref, **values}
            yield Problem(1, "still", text, group.ref, head.key, head.offset, since=since, messages=group.lag)
            return


def _unserved(group: GroupOverview, now: int, times: StallTimes) -> Iterator[Problem]:
    subsets = {row.subset for row in group.live}
    if EVERYTHING in subsets or group.uptime(now) < times.started:
        return
    for head in group.moving_heads:
        since = group.waiting_since(head.published_at)
        if age(now, since) >= times.stuck and not any(head.key in subset for subset in subsets):
            text = _("No live subscriber of %(ref)s claims partition %(key)s: it is in none of their subsets.")
            text %= {"ref": group.ref, "key": partition_text(*lane_of(head.key), quoted=True)}
            messages = group.backlog_of(head.key)
            yield Problem(0, "unserved", text, group.ref, head.key, since=since, messages=messages)
            return
