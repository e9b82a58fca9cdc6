"""The machine that drives jobs beside a model of what each of them may become.

It is apart from ``machine``: jobs have one group per queue in shared mode, and the model of messages would have to know
of results, too. What their messages do is compared there.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import transaction
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from django_mysqlqueue import operations
from django_mysqlqueue.models import (
    DeliveryState,
    JobResult,
    JobStage,
    OutboxMessage,
    QueueMessage,
    SubscriberHeartbeat,
)
from django_mysqlqueue.tasks import JobContext, RetryLater, call, cancel_job, enqueue_chain, exceptions, job
from django_mysqlqueue.tasks.framework import task_backends
from tests.app.models import Effect
from tests.conftest import empty
from tests.model.machine import LATER
from tests.support import invariants, job_invariants, job_worlds
from tests.support.harness import USING, Sub, sequence
from tests.support.internals import registry
from tests.support.still_time import Time
from tests.support.tables import Tables

if TYPE_CHECKING:
    # The frameworks' declarations refuse a task whose context is a ``JobContext``.
    def task(**options: Any) -> Any: ...
else:
    try:
        from django.tasks import task
    except ImportError:
        from django_tasks import task

MAX_ATTEMPTS = 2
ACTIONS = (
    "return",
    "raise",
    "refuse",
    "ask later",
    "ask much later",
    "ask without counting",
    "continue",
    "continue late",
)
LATER_BY = {"ask later": 5, "ask much later": 61, "ask without counting": 61, "continue": 5, "continue late": 61}
"""The delays of actions that ask for another call, in seconds: a long one moves the message."""
FATES = ("fine", "fine", "fine", "bad")
"""A job that is bad raises until its attempts are used up, and returns after a redrive."""
ENDED = ("SUCCESSFUL", "FAILED")
_machines: list[JobMachine] = []
"""The machine that runs, for the tasks."""


class Told(Exception):
    """A task raises it when its script says so. It is retried."""


class Refused(Exception):
    """The same. It is not retried."""


@task(takes_context=True)
@job(reject_on=Refused)
def atomic(context: JobContext) -> None:
    Effect.objects.create(name=context.task_result.id)
    _machines[-1].act(context)


@task(takes_context=True)
@job(reject_on=Refused, atomic=False)
def plain(context: JobContext) -> None:
    _machines[-1].act(context)


@task(takes_context=True)
@job(reject_on=Refused, unique="until_finished")
def single(context: JobContext) -> None:
    Effect.objects.create(name=context.task_result.id)
    _machines[-1].act(context)


TASKS = {"atomic": atomic, "plain": plain}


@dataclass
class Job:
    """What has happened to a job."""

    kind: str
    fate: str
    before: list[str]
    """The jobs of the stage before."""
    status: str = "READY"
    """After the last step."""
    returned: int = 0
    raised: int = 0
    refused: int = 0
    continued: int = 0
    """How often it has asked to be called again with its writes kept."""
    asked: int = 0
    """How often it has asked for another attempt that counts."""
    losses: int = 0
    """How often its subscriber was lost, or a seek has revoked its delivery."""
    skips: int = 0
    """How often a seek may have skipped its message."""
    is_cancelled: bool = False
    was_asked: bool = False
    """Whether it was asked to stop."""
    holds: bool = False
    """Whether it holds the unique key of ``single``."""


class JobMachine(RuleBasedStateMachine):
    """The rules. Those that pick a subscriber or a job count around the ones that are there."""

    clock: Time
    seen: Counter[str]
    """What became of the jobs of all examples: their statuses, and the last exceptions of those that failed."""

    def __init__(self) -> None:
        super().__init__()
        empty()
        Effect.objects.all().delete()
        _machines[:] = [self]
        self.jobs: dict[str, Job] = {}
        self.subs: list[Sub] = []
        self.script: list[str] = []
        self.problems: list[str] = []
        self.started = 0
        self.may_revive = False
        self.is_overlapping = False
        """Whether a subscriber may work on what it has lost, or a job may have two messages."""
        self.sound = True

    # -- rules' helpers -------------------------------------------------------

    def begin(self) -> None:
        """Every rule begins so."""
        self.sound = self.may_revive = False
        self.clock.move(7)

    def act(self, context: JobContext) -> None:
        """Do what the script says for a job that starts."""
        name = context.task_result.id
        one = self.jobs[name]
        is_bad = one.fate == "bad" and one.raised < MAX_ATTEMPTS
        action = self.script.pop(0) if self.script else "raise" if is_bad else "return"
        statuses = dict(JobResult.objects.filter(id__in=[name, *one.before]).values_list("id", "status"))
        if any(statuses[other] != "SUCCESSFUL" for other in one.before):
            self.problems.append(f"{name} started before the jobs before it had ended")
        if one.status in ENDED and statuses[name] == one.status and not self.is_overlapping:
            self.problems.append(f"{name} started, although it was {one.status}")
        if action == "raise":
            one.raised += 1
            raise Told
        if action == "refuse":
            one.refused += 1
            raise Refused
        if context.attempt > MAX_ATTEMPTS and not self.is_overlapping:
            self.problems.append(f"{name} started its attempt {context.attempt}")
        if action.startswith("ask"):
            self.seen[action] += 1
            counts = action != "ask without counting"
            one.asked += counts
            raise RetryLater(LATER_BY[action], counts=counts)
        if action.startswith("continue"):
            self.seen[action] += 1
            one.continued += 1
            context.retry(LATER_BY[action])
            return
        one.returned += 1

    def pick(self, who: int) -> Sub:
        return self.subs[who % len(self.subs)]

    def start(self) -> None:
        self.started += 1
        self.subs.append(Sub(registry.handlers()[job_worlds.JOBS], name=f"s{self.started}", claim_size=3, prefetch=6))

    def lose(self, sub: Sub) -> None:
        """Let others take what a subscriber holds."""
        SubscriberHeartbeat.objects.filter(subscriber_name=sub.name).delete()
        held = DeliveryState.objects.filter(delivered_by=sub.name, acked=False)
        offsets = list(held.values_list("message_offset", flat=True))
        held.update(invisible_until=0)
        for row in QueueMessage.objects.filter(offset__in=offsets):
            self.jobs[row.original_id or row.message_id].losses += 1

    # -- rules ----------------------------------------------------------------

    ONE = st.tuples(st.sampled_from(["atomic", "atomic", "plain"]), st.sampled_from(FATES))
    STAGES = st.lists(st.lists(ONE, min_size=1, max_size=2), max_size=3)
    WHO = st.integers(0, 3)

    @initialize(stages=STAGES)
    def declare(self, stages: list[list[tuple[str, str]]]) -> None:
        self.begin()
        self.start()
        self.start()
        for sub in self.subs:
            sub.step()  # It registers the group.
        self.enqueue(stages, later=False, commit=True)

    @rule(stages=STAGES, later=st.sampled_from([False, False, True]), commit=st.sampled_from([True, True, False]))
    def enqueue(self, stages: list[list[tuple[str, str]]], later: bool, commit: bool) -> None:
        """Enqueue a chain, or single jobs if there is one stage, and perhaps roll back."""
        self.begin()
        after = datetime.datetime.fromtimestamp(self.clock.now / 1000 + LATER, datetime.UTC) if later else None
        calls = [[call(TASKS[kind].using(run_after=after)) for kind, _ in stage] for stage in stages]
        with transaction.atomic():
            results = enqueue_chain(*calls) if len(calls) > 1 else [[one.task.enqueue() for one in of] for of in calls]
            transaction.set_rollback(not commit)
        before: list[str] = []
        for stage, of in zip(stages, results, strict=True):
            if commit:
                self.jobs |= {one.id: Job(*drawn, before) for drawn, one in zip(stage, of, strict=True)}
            before = [one.id for one in of]

    @rule(fate=st.sampled_from(["fine", "bad"]), commit=st.sampled_from([True, True, False]))
    def enqueue_single(self, fate: str, commit: bool) -> None:
        """Enqueue a job that is unique until it has ended: if another one holds the key, that one is returned."""
        self.begin()
        holders = [name for name, one in self.jobs.items() if one.holds]
        with transaction.atomic():
            result = single.enqueue()
            transaction.set_rollback(not commit)
        if holders:
            assert [result.id] == holders
            self.seen[f"found {result.status}"] += 1
        elif commit:
            self.jobs[result.id] = Job("single", fate, [], holds=True)

    @precondition(lambda self: self.subs)
    @rule(
        who=WHO,
        times=st.integers(0, 6),
        script=st.lists(st.sampled_from(ACTIONS), max_size=2),
        flush=st.sampled_from([True, True, False]),
    )
    def work(self, who: int, times: int, script: list[str], flush: bool) -> None:
        """Claim, and run some jobs; with ``flush=False``, what is not atomic is not written yet."""
        self.begin()
        sequence()
        self.script = list(script)
        sub = self.pick(who).step()
        sub.work(times)
        if flush:
            sub.flush()

    @precondition(lambda self: self.subs)
    @rule(who=WHO, how=st.sampled_from(["leave", "vanish", "vanish", "is overtaken"]))
    def end_a_subscriber(self, who: int, how: str) -> None:
        """It leaves, vanishes with what it has not written, or works on with what others may take."""
        self.begin()
        sub = self.pick(who)
        if how == "leave":
            sub.leave()
            left = JobResult.objects.filter(status="RUNNING", worker_ids__endswith=f"{sub.name}\n")
            assert self.is_overlapping or not left.exists(), "what it had not started is not ready again"
        else:
            self.lose(sub)
        if how == "is overtaken":
            self.is_overlapping = True
            return
        self.subs.remove(sub)
        self.start()

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 20), commit=st.sampled_from([True, True, False]))
    def cancel(self, which: int, commit: bool) -> None:
        self.begin()
        name = list(self.jobs)[which % len(self.jobs)]
        one = self.jobs[name]
        with transaction.atomic():
            result = task_backends["default"].get_result(name)
            cancel_job(result)
            transaction.set_rollback(not commit)
        now = {"READY": "FAILED"}.get(one.status, one.status)
        assert str(result.status) == now, f"{name} was {one.status}, and cancel_job() found {result.status}"
        if commit:
            one.is_cancelled = one.is_cancelled or one.status == "READY"
            one.was_asked = one.was_asked or one.status == "RUNNING"

    @rule(what=st.sampled_from(["redrive", "redrive", "rewind", "skip"]))
    def operate(self, what: str) -> None:
        self.begin()
        sequence()
        if what == "redrive":
            letters = QueueMessage.objects.exclude(failed_group="")
            if letters.exists():
                self.may_revive = True
                self.seen["redriven"] += 1
                names = {one.original_id for one in letters}
                operations.redrive(job_worlds.JOBS.topic, actor="ada")
                names -= self.redrive_single(names)
                statuses = set(JobResult.objects.filter(id__in=names).values_list("status", flat=True))
                assert self.is_overlapping or statuses == ({"READY"} if names else set()), (
                    f"after a redrive they are {statuses}"
                )
        elif QueueMessage.objects.filter(topic=job_worlds.JOBS.topic).exists():
            operations.seek(*job_worlds.JOBS, "earliest" if what == "rewind" else "latest", actor="ada")
            self.is_overlapping = True
            for one in self.jobs.values():
                one.losses += one.status == "RUNNING"
                one.skips += what == "skip"

    def redrive_single(self, names: set[str]) -> set[str]:
        """Return the unique jobs among those that were redriven. One of them has taken the key, if it was free."""
        ours = {name for name in names if self.jobs[name].kind == "single"}
        failed = [name for name in ours if self.jobs[name].status == "FAILED"]
        back = [name for name in failed if JobResult.objects.get(id=name).status == "READY"]
        if any(one.holds for one in self.jobs.values()):
            assert not back
            if failed:
                self.seen["left"] += 1
        else:
            assert len(back) == bool(failed)
        for name in back:
            self.jobs[name].holds = True
        return ours

    @rule(seconds=st.sampled_from([1, 10, 60]))
    def pass_time(self, seconds: int) -> None:
        self.begin()
        self.clock.move(seconds * 1000)

    # -- what must hold -------------------------------------------------------

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert not self.problems, self.problems
        rows = {row.id: row for row in JobResult.objects.all()}
        assert rows.keys() == self.jobs.keys()
        tables, stages = Tables.read(USING), list(JobStage.objects.all())
        assert not invariants.at_any_moment(tables)
        unfinished = [row for row in rows.values() if row.status not in ENDED]
        assert not list(job_invariants.contradictions(tables, unfinished, stages))
        assert not list(job_invariants.miscounted(rows.values(), stages))
        effects = Counter(one.name for one in tables.effects)
        for name, one in self.jobs.items():
            for problem in self.broken(name, one, rows[name], effects[name]):
                raise AssertionError(problem)
            one.holds = one.holds and rows[name].status not in ENDED
            assert (rows[name].unique_key is not None) == one.holds, f"{name} is {rows[name].status}: {one.holds}"
            if one.status != rows[name].status:
                one.status = str(rows[name].status)
                self.seen[one.status] += 1
        assert effects.keys() <= self.jobs.keys()
        self.sound = True

    def broken(self, name: str, one: Job, row: JobResult, effects: int) -> Iterator[str]:
        """Yield what is wrong with a job."""
        is_successful = row.status == "SUCCESSFUL"
        # A call that asked to continue has left its writes, unless it was overtaken.
        if one.kind != "plain" and not is_successful <= effects <= is_successful + one.continued:
            yield f"{name} is {row.status} with {effects} effects after {one.continued} calls that were to continue"
        if one.kind != "plain" and not self.is_overlapping and effects != is_successful + one.continued:
            yield f"{name} is {row.status} with {effects} effects, but has continued {one.continued} times"
        if is_successful and not one.returned:
            yield f"{name} is SUCCESSFUL, but has never returned"
        revived = (self.may_revive or self.was_skipped(one)) and one.status == "FAILED" and not one.is_cancelled
        if one.status in ENDED and row.status != one.status and not revived:
            yield f"{name} was {one.status} and is {row.status}"
        if one.is_cancelled and row.status != "FAILED":
            yield f"{name} was cancelled and is {row.status}"
        if row.status == "FAILED" and one.status != "FAILED" and not self.is_explained(one, row):
            yield f"{name} has failed: {row.errors}"

    def was_skipped(self, one: Job) -> bool:
        """Whether a delivery may restart a job: its message or one of an earlier stage was skipped."""
        return one.skips > 0 or any(self.was_skipped(self.jobs[name]) for name in one.before)

    def is_explained(self, one: Job, row: JobResult) -> bool:
        last = task_backends["default"].get_result(row.id).errors[-1].exception_class
        self.seen[last.__name__] += 1
        if last is exceptions.JobCancelled:
            return one.is_cancelled or one.was_asked
        if last is exceptions.JobSkipped:
            return one.skips > 0
        if last is exceptions.EarlierJobFailed:
            return bool(one.before)
        if last is exceptions.WorkerLost:
            return one.losses > 0
        if last is Refused:
            return one.refused > 0
        return last in (Told, RetryLater) and (one.was_asked or one.raised + one.asked >= MAX_ATTEMPTS)

    def teardown(self) -> None:
        if self.sound and self.jobs:
            self.drain()
        super().teardown()

    def drain(self) -> None:
        """A healthy subscriber ends all jobs."""
        for sub in self.subs:
            self.lose(sub)
        self.subs.clear()
        self.start()
        self.script = []
        for _ in range(20):
            self.begin()
            self.clock.move(70_000)
            sequence()
            self.subs[0].settle()
            self.agrees_with_the_model()
            if not any(model.objects.exists() for model in (OutboxMessage, DeliveryState)):
                break
        assert not invariants.drained(Tables.read(USING))
        assert {one.status for one in self.jobs.values()} <= set(ENDED)
