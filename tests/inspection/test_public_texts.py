"""What a public health page shows of a problem of each kind: no host, no database user, no text of an error."""

from __future__ import annotations

import dataclasses
import json
from typing import get_args

from django.core.management.base import CommandError

from django_mysqlqueue import health, publish
from django_mysqlqueue.inspection import (
    find_problems,
    get_overview,
    group_problems,
    queue_problems,
    subscriber_problems,
    topics,
)
from django_mysqlqueue.inspection.always_failing import AlwaysFailing
from django_mysqlqueue.inspection.health import _finding
from django_mysqlqueue.inspection.limited import Limited
from django_mysqlqueue.inspection.outbox import RefusedMessage, RelayBacklog
from django_mysqlqueue.inspection.problem import Kind
from django_mysqlqueue.inspection.subscriber_problems import Death, NewestJobs
from django_mysqlqueue.management import refusals
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.service.readers import RegisteredReader
from tests.inspection.test_group_problems import NOW, TIMES, G, ago, ended, group, head, live
from tests.inspection.test_queue_problems import overview, run, schedule
from tests.support.factories import QuarantinedMessageFactory
from tests.support.harness import USING, handler, sequence
from tests.support.internals import (
    Bucket,
    Count,
    HealthSettings,
    Holder,
    Override,
    Route,
    Session,
    Subset,
    open_transactions,
)

HOST, USER, ERROR, NAME = "db-7.internal", "ada@10.0.3.7", "Access denied (using password)", "web-3"
SECRETS = (HOST, USER, "10.0.3.7", "denied", NAME, "MyDriverError")


def subscriber(**values):
    """A subscriber whose name, host and errors nobody else may learn."""
    one = live(is_live=values.pop("is_live", True), subset=values.pop("subset", None))
    unknown = json.dumps({"shop.tasks.pay": [ago(90), ERROR]})
    info = {**one.info, "host": HOST, "error": "", "unknown": "{}", "p50_us": 9 * 10**6, "p95_us": 10**7, **values}
    if values.get("unknown"):
        info["unknown"] = unknown
    return dataclasses.replace(one, name=NAME, info=info)


def of_groups():
    dropped, moves = ConsumerGroup.AfterSeek.DROPPED, ConsumerGroup.AfterSeek.MOVES
    served = {"subscribers": [subscriber()]}
    failed = dataclasses.replace(head(900, attempts=1), last_error=ERROR, delivered_by=NAME)
    states = [
        group(head(900), subscribers=[subscriber(is_live=False, supervised=True)]),
        group(head(900), filter=ERROR, **served),
        group(failed, **served),
        group(head(900), subscribers=[subscriber(error=ERROR)]),
        group(head(900), paused=True),
        group(head(900), after_seek=ConsumerGroup.AfterSeek.STAY),
        group(head(900), after_seek=dropped),
        group(head(900), after_seek=moves),
        group(head(900), subscribers=[subscriber(subset=Subset(("other",)))]),
        group(head(900), **served),
        group(head(900), limited=Limited(True, 3, True, by_rate=True), **served),
    ]
    for one in states:
        yield from group_problems.progress(one, handler("t", "g", mode="shared"), NOW, TIMES, moves=False)
        yield from group_problems.progress(one, None, NOW, TIMES, moves=False)
    paused = Override("paused_tasks", ["shop.tasks.pay"], ago(90), USER)
    yield from group_problems.paused_tasks(dataclasses.replace(group(), overrides=(paused,)))
    for entered in (1, 900):
        minute = Bucket(G, ago(60), 300, 0, 0, 0, 0, 0, (), None, entered, 1)
        yield from group_problems.speed(group(head(900), lag=900, **served), [minute], NOW)
    many = {"retrying": Count(20), "recent_dead_letters": Count(11), "dead_letters": Count(11)}
    one = group(head(900), **many, **served)
    limits = HealthSettings(max_failure_ratio=0.5, min_attempts=4)
    yield from group_problems.failures(one, None, group_problems.Attempts(ended((0, 9, 9)), limits, 600), TIMES, NOW)
    keys = AlwaysFailing(
        ("k",), Count(2), Count(9), since=ago(90), error=ERROR, waiting=Count(2), recent=2, offsets=(1, 2)
    )
    yield group_problems.retrying(G, keys, limits, NOW)
    tasks = AlwaysFailing(
        ("shop.tasks.pay",), Count(2), Count(9), since=ago(90), error=ERROR, waiting=Count(2), recent=2, are_tasks=True
    )
    yield group_problems.retrying(G, tasks, limits, NOW)


def of_the_queue(monkeypatch):
    session = Session(USING)
    monkeypatch.setattr(open_transactions, "sequencer_holder", lambda session, *, least: Holder(7, USER, 90, True))
    monkeypatch.setattr(open_transactions, "oldest", lambda session: (10**6, 7))
    lost = group(head(900), lag=3, subscribers=[subscriber(is_live=False)])
    served = group(head(900), subscribers=[subscriber()])
    yield from subscriber_problems.lost_subscribers(session, overview(lost))
    yield from queue_problems.outbox(session, overview(served, due=900), TIMES)
    yield from queue_problems.outbox(session, overview(served, due=900, sequenced=1), TIMES)
    QuarantinedMessageFactory(reason=ERROR)
    yield from queue_problems.quarantined(session, overview(served))
    yield from queue_problems.long_transactions(session, NOW, TIMES)
    yield from queue_problems.slow_database(overview(served), 0.25)
    yield from topics.disk(session, dataclasses.replace(overview(served), log_bytes=9), 8)
    refused = RefusedMessage("t", "m", 7, ERROR)
    for relay in (RelayBacklog("copy", Count(2), ago(900), refused), RelayBacklog("copy", Count(2), ago(900))):
        yield from queue_problems.relays(overview(relays=(relay,)), TIMES)
    reader = RegisteredReader("lake", (), 0, ago(3 * 86_400))
    yield from queue_problems.readers(dataclasses.replace(overview(), last_offset=9, readers=(reader,)), TIMES)
    moved = dataclasses.replace(overview(), routes={"t": Route("copy", USING)})
    yield from queue_problems.routes(moved)
    failed = schedule(900, error=ERROR, runs=(run("FAILED", error="MyDriverError"),))
    monkeypatch.setattr(queue_problems, "list_schedules", lambda **options: [failed])
    yield from queue_problems.recurring(overview(served), TIMES)
    dead = [Death(f"{NAME}:{number}", ago(5), "SIGKILL", HOST, frozenset()) for number in range(2)]
    yield subscriber_problems._of_processes(dead, NOW, ago(9))
    yield subscriber_problems._of_message((G, 7), "shop.tasks.pay", dead, NOW, ago(9))
    other = dataclasses.replace(subscriber(), name=f"{NAME}:2")
    jobs = NewestJobs(Count(3), frozenset({other.name}))
    monkeypatch.setattr(subscriber_problems, "newest_jobs", lambda *args, **options: jobs)
    lacks = subscriber(unknown=True)
    for subscribers in ([lacks], [lacks, other]):
        yield from subscriber_problems.missing_tasks(session, overview(group(subscribers=subscribers)), TIMES)


def of_the_database():
    refusals.record({}, "pod", CommandError(f"{ERROR}: {USER} on {HOST}"))
    publish("typo", 1)
    sequence()
    return [one for one in find_problems(get_overview(using=USING)) if one.kind in ("refused", "groupless")]


def test_no_kind_of_problem_names_a_host_a_user_or_an_error(db, monkeypatch, no_handlers):
    monkeypatch.setattr(refusals.socket, "gethostname", lambda: HOST)
    found = of_the_database()
    found += [*of_groups(), *of_the_queue(monkeypatch)]
    assert {one.kind for one in found} == {*get_args(Kind)} - {"unavailable"}, "that one has no finding"
    shown = [health._public(_finding(one)) for one in found]
    assert [text for text in shown if any(secret in text for secret in SECRETS) or not text] == []
    refused = next(one for one in found if one.kind == "refused")
    assert ERROR in refused.text, "those who may see it do"
    assert health._public(_finding(refused)) == "A subscriber has refused to start."
