"""The machine that drives the real code beside the model in ``queue_model``."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.db import transaction
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from django_mysqlqueue import Message, cancel, publish_many
from django_mysqlqueue.exceptions import OperationRefused, StaleDelivery
from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.inspection import get_overview, list_partitions
from django_mysqlqueue.models import ConsumerGroup, DeliveryState, OutboxMessage, PartitionLease
from django_mysqlqueue.operations import dropping, group_settings, retrying
from django_mysqlqueue.operations.dead_lettering import dead_letter_now
from django_mysqlqueue.options.backoff import Backoff
from tests.app.models import Effect
from tests.conftest import QUEUE_MODELS, empty
from tests.model.other_database import MOVES, OTHER, RELAYED, TOPIC, OtherDatabase
from tests.model.queue_model import Life, Model, Published, Spec
from tests.model.refusals import Refusals
from tests.model.sql_clients import SqlClients
from tests.support import garbage, invariants, oracle
from tests.support.filtering import EU, US
from tests.support.harness import USING, Sub, handler, lag
from tests.support.inspected import backlogs_of
from tests.support.internals import (
    Batch,
    Claimed,
    GroupRef,
    Heart,
    Held,
    Session,
    call,
    groups,
    lane,
    lane_of,
    sequencing,
)
from tests.support.still_time import Time
from tests.support.tables import Tables

LATE = GroupRef("late", "a")
SLOW = Backoff(initial=4, factor=3, jitter=0)
SPECS = [
    Spec(GroupRef("skip", "a"), backoff=SLOW),
    Spec(GroupRef("strict", "a"), on_failure="block", atomic=True, max_attempts=2),
    Spec(GroupRef("shared", "a"), mode="shared", backoff=SLOW),
    Spec(GroupRef("batch", "b"), atomic=True, batch_size=3),
    Spec(GroupRef("strict", "b"), on_failure="block", backoff=SLOW),
    Spec(GroupRef("shared", "b"), mode="shared", atomic=True, max_attempts=2),
    Spec(LATE, max_attempts=1),
    Spec(MOVES),
]
OF_ALL = (LATE, MOVES)
"""Groups that all subscribers work for, if they are registered."""
KEYS = ("x", "y", lane("x", 10), lane("y", -10))
LEASE, RENEWAL, VISIBILITY = 30.0, 10.0, 20.0
ACTIONS = ("ack", "nack", "raise", "nack later", "snooze", "snooze later", "reject", "ack inside")
RARE = (
    "late",
    "late",
    "pause",
    "resume",
    "resume",
    "drop",
    "register",
    "collect",
    "clock",
    "give up",
    "give up",
    "retry",
    "retry later",
    "override",
    "restore",
)
LATER = 8
"""Seconds that a put-off delivery waits."""


Drawn = (
    tuple[str, str, int, int]
    | tuple[str, str, int, int, str | list[str]]
    | tuple[str, str, int, int, str | list[str], int]
    | tuple[str, str, int, int, str | list[str], int, str]
)
"""A message: topic, key, which id is repeated, seconds of delay, region, seconds until it expires, coalesce key."""


class AsTold(Exception):
    """What a handler raises when its script says so."""


class Process(Sub):
    """A subscriber with a real heart that tells the model what it starts and what it says."""

    def __init__(self, machine: Machine, number: int, refs: list[GroupRef], claim_size: int) -> None:
        self.machine = machine
        self.ended: set[tuple[GroupRef, int, int]] = set()
        """(group, offset, token) of what this process has said the last word of."""
        self.script: list[str] = []
        self.running: list[Held] = []
        self._begun: dict[tuple[GroupRef, int, int], Life | None] = {}
        self.frozen = False
        self.outdated: set[GroupRef] = set()
        """Groups that were dropped since it started: what it remembers of them is out of date."""
        handlers = [self._handler(machine.model.specs[ref]) for ref in refs]
        super().__init__(*handlers, name=f"p{number:04}", claim_size=claim_size, prefetch=12, lease_duration=LEASE)

    def _make_heart(self) -> Heart:
        return Heart(
            USING,
            self.name,
            list(self.handlers),
            interval=RENEWAL,
            lease=LEASE,
            info={"subset": self.subset.as_json()},
            progress=self.progress,
        )

    def beat(self) -> None:
        self.heart._beat()

    def step(self, *, tick: bool = True, times: int = 1) -> Process:
        self.progress.made()
        super().step(tick=tick, times=times)
        return self

    def batch_of(self, held: Held) -> Batch:
        return self._batches[id(held)]

    def _handler(self, spec: Spec) -> Any:
        options: dict[str, Any] = {"batch": True, "batch_size": spec.batch_size} if spec.batch_size else {}
        return handler(
            spec.ref.topic,
            spec.ref.group,
            lambda delivered: self._guarded(spec, delivered if spec.batch_size else [delivered]),
            mode=spec.mode,
            on_failure=spec.on_failure,
            atomic=spec.atomic,
            max_attempts=spec.max_attempts,
            backoff=spec.backoff,
            visibility_timeout=VISIBILITY,
            **options,
        )

    def begin(self, claimed: Claimed, number: Any) -> Life | None:
        """Tells the model that a handler starts, once; None where nothing may come of it."""
        name = (claimed.ref, claimed.offset, claimed.token)
        if name not in self._begun:
            self._begun[name] = self.machine.model.start(self.name, self.ended, claimed, number)
        return self._begun[name]

    def begin_all(self, held: Held) -> None:
        """What is to run later starts now."""
        for one in self._batches[id(held)].items:
            if not self.is_passed(one):
                # Its handler runs: that it expires meanwhile, or is superseded, changes nothing.
                one.expires, one.body = float("inf"), one.body._replace(coalesce_key=None)
                self.begin(one.claimed, int(one.body.payload))

    def is_passed(self, held: Held) -> bool:
        """Whether the handler is not called with a message, as its thread judges before the call."""
        return held.is_expired() or bool(held.body.coalesce_key and call._superseded([held], USING))

    def _guarded(self, spec: Spec, deliveries: list[Any]) -> None:
        try:
            self._handle(spec, deliveries)
        except (AsTold, StaleDelivery):
            raise
        except BaseException as error:
            self.machine.model.problems.append(error)  # raising means something else here
            raise

    def _handle(self, spec: Spec, deliveries: list[Any]) -> None:
        model = self.machine.model
        lives = [self.begin(delivery._claimed, delivery.payload) for delivery in deliveries]
        actions = [self.script.pop(0) if self.script else "ack" for _ in deliveries]
        if "raise" in actions:
            actions = ["raise"] * len(actions)
        for delivery, action, life in zip(deliveries, actions, lives, strict=True):
            # A batch commits the writes of all when it settles one: for what it puts off it writes nothing.
            if spec.atomic and (len(deliveries) == 1 or action in ("ack", "reject", "raise", "ack inside")):
                Effect.objects.create(name="|".join(spec.ref), value=delivery.offset)
            if life is not None and life is model.lives.get(spec.ref):
                self._note(spec, delivery, action)
            self._say(spec, delivery, action)
        if "raise" in actions:
            raise AsTold

    def _note(self, spec: Spec, delivery: Any, action: str) -> None:
        kind = {"raise": "nack", "ack inside": "ack"}.get(action, action.removesuffix(" later"))
        self.machine.model.said(delivery._claimed, kind)
        if kind in ("ack", "reject") or (kind == "nack" and delivery.attempt >= spec.max_attempts):
            self.ended.add((spec.ref, delivery.offset, delivery._claimed.token))

    def _say(self, spec: Spec, delivery: Any, action: str) -> None:
        delay = LATER if action.endswith(" later") else 0
        if action.startswith("nack"):
            delivery.nack(delay)
        elif action.startswith("snooze"):
            delivery.snooze(delay)
        elif action == "reject":
            delivery.reject("as told")
        elif action == "ack inside" and not spec.atomic:
            with transaction.atomic(USING):
                delivery.ack()
                self.machine.meanwhile(self)
        elif action.startswith("ack"):
            delivery.ack()


class Publisher:
    """Transactions on a connection of its own; on SQLite, with its one writer, on that of the test."""

    def __init__(self, thread: ThreadPoolExecutor | None) -> None:
        self._thread = thread
        self._transaction: Any = None
        self.messages: list[Published] = []

    @property
    def is_open(self) -> bool:
        return self._transaction is not None

    def begin(self) -> None:
        self._transaction = transaction.atomic(USING)
        self._do(self._transaction.__enter__)

    def publish(self, messages: list[tuple[Published, int]]) -> None:
        for one, delay in messages:
            priority, key = lane_of(one.key)
            options: dict[str, Any] = {"delay": delay or None, "priority": priority, "metadata": dict(one.metadata)}
            if one.coalesce:
                options["coalesce"] = one.coalesce
            if one.expires:
                options["expires_at"] = datetime.datetime.fromtimestamp(one.expires / 1000, datetime.UTC)
                options["delay"] = None
            message = Message(one.number, key=key, id=one.id, **options)
            self._do(lambda message=message, topic=one.topic: publish_many(topic, [message]))
            self.messages.append(one)

    def cancel(self, topic: str, id: str) -> int:
        return int(self._do(lambda: cancel(id, topic=topic)))

    def end(self, *, commit: bool) -> list[Published]:
        """Returns what was committed."""
        error = None if commit else RuntimeError("roll back")
        self._do(lambda: self._transaction.__exit__(error and type(error), error, None))
        self._transaction = None
        messages, self.messages = self.messages, []
        return messages if commit else []

    def _do(self, function: Callable[[], Any]) -> Any:
        return function() if self._thread is None else self._thread.submit(function).result(60)


class Machine(OtherDatabase, SqlClients, Refusals):
    """The rules. Those that pick a subscriber count around the ones that are there."""

    clock: Time
    publishers: list[Publisher]
    """One without a thread, and on servers some with."""
    aside: ThreadPoolExecutor | None
    """Another connection, on servers."""

    def __init__(self) -> None:
        super().__init__()
        for model in (*QUEUE_MODELS, Effect):
            if model.objects.exists():
                model.objects.all().delete()
        empty(OTHER)
        self.model = Model(SPECS)
        self.model.entering[TOPIC] = RELAYED
        self.processes: list[Process] = []
        self.started = 0
        self.numbers = 0
        self.sound = True
        self.clock.hours_off = 0.0

    # -- rules' helpers -------------------------------------------------------

    def begin(self) -> None:
        """Every rule begins so: a step has a number and takes a little time."""
        self.sound = False
        self.clock.move(7)
        self.model.now = self.clock.now
        self.model.step += 1
        self.model.may_collect = False

    def has(self, *, frozen: bool = False) -> bool:
        return any(process.frozen == frozen for process in self.processes)

    def pick(self, who: int, *, frozen: bool = False) -> Process:
        there = [process for process in self.processes if process.frozen == frozen]
        return there[who % len(there)]

    def register(self, ref: GroupRef, start: str) -> None:
        groups.register(USING, ref, mode=self.model.specs[ref].mode, start=start)
        self.model.registered(ref)

    def some_groups(self, which: int) -> list[GroupRef]:
        """A bit for each that is there; all have some of them once they are registered."""
        refs = [spec.ref for bit, spec in enumerate(SPECS) if spec.ref in OF_ALL or which & 1 << bit]
        return [ref for ref in refs if ref in self.model.lives] or [SPECS[0].ref]

    def start(self, refs: list[GroupRef], claim_size: int = 10) -> Process:
        for ref in refs:
            self.register(ref, "earliest")
        self.started += 1
        process = Process(self, self.started, refs, claim_size)
        self.processes.append(process)
        return process

    def message(
        self,
        topic: str,
        key: str,
        repeat: int,
        delay: int,
        region: str | list[str] = "",
        expires_in: int = 0,
        coalesce: str = "",
    ) -> tuple[Published, int]:
        """A new message; ``repeat`` may give it the id of an earlier one."""
        self.numbers += 1
        name = f"id{repeat}" if repeat else f"n{self.numbers}"
        due = self.clock.now + delay * 1000 if delay and not expires_in else 0
        expires = self.clock.now + expires_in * 1000 if expires_in else 0
        metadata = {"region": region} if region else {}
        return Published(
            self.numbers,
            topic,
            key,
            name,
            due,
            self.model.step,
            metadata=metadata,
            expires=expires,
            coalesce="" if topic == TOPIC else coalesce,
        ), delay

    # -- rules ----------------------------------------------------------------

    MESSAGES = st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "a", "b", TOPIC, TOPIC]),
            st.sampled_from(KEYS),
            st.sampled_from([0, 0, 0, 1, 2]),
            st.sampled_from([0, 0, 0, 0, 5, 25]),
            st.sampled_from(["", "eu", "us", ["eu", "us"], ["eu", "us"]]),
            st.sampled_from([0, 0, 0, 15]),
            st.sampled_from(["", "", "", "c"]),
        ),
        min_size=1,
        max_size=5,
    )
    SCRIPT = st.lists(st.sampled_from(ACTIONS), max_size=6)
    SOME_GROUPS = st.integers(1, 2 ** (len(SPECS) - len(OF_ALL)) - 1)
    WHO = st.integers(0, 3)

    @initialize(messages=MESSAGES, first=SOME_GROUPS, second=SOME_GROUPS)
    def declare(self, messages: list[Drawn], first: int, second: int) -> None:
        self.begin()
        for spec in SPECS:
            if spec.ref != LATE:
                self.register(spec.ref, "earliest")
        self.start(self.some_groups(first))
        self.start(self.some_groups(second))
        self.publish(messages, commit=True)

    @rule(messages=MESSAGES, commit=st.sampled_from([True, True, True, False]))
    def publish(self, messages: list[Drawn], commit: bool) -> None:
        """A whole transaction."""
        self.begin()
        publisher = self.publishers[0]
        publisher.begin()
        publisher.publish([self.message(*one) for one in messages])
        self.model.commit(publisher.end(commit=commit))

    @precondition(lambda self: any(one.due > self.clock.now for one in self.model.committed.values()))
    @rule(which=st.integers(0, 3), commit=st.sampled_from([True, True, False]))
    def cancel_a_message(self, which: int, commit: bool) -> None:
        """By its id, in a transaction that may roll back."""
        self.begin()
        waiting = [one for one in self.model.committed.values() if one.due > self.clock.now]
        if not waiting:
            return  # the step has taken its time
        one = waiting[which % len(waiting)]
        expected = self.model.scheduled(one.topic, one.id)
        publisher = self.publishers[0]
        publisher.begin()
        assert publisher.cancel(one.topic, one.id) == len(expected)
        publisher.end(commit=commit)
        if commit:
            self.model.cancel(expected)

    @precondition(lambda self: len(self.publishers) > 1)
    @rule(which=st.integers(1, 3), messages=MESSAGES)
    def publish_in_an_open_transaction(self, which: int, messages: list[Drawn]) -> None:
        self.begin()
        publisher = self.publishers[which]
        if not publisher.is_open:
            publisher.begin()
        publisher.publish([self.message(*one) for one in messages])

    @precondition(lambda self: any(publisher.is_open for publisher in self.publishers))
    @rule(which=st.integers(0, 3), commit=st.sampled_from([True, True, False]))
    def end_a_transaction(self, which: int, commit: bool) -> None:
        self.begin()
        ours = [publisher for publisher in self.publishers if publisher.is_open]
        self.model.commit(ours[which % len(ours)].end(commit=commit))

    @rule(rows=st.integers(1, 4))
    def sequence_a_little(self, rows: int) -> None:
        self.begin()
        sequencing.sequence(USING, max_rows=rows)

    @precondition(lambda self: len(self.processes) < 4)
    @rule(which=SOME_GROUPS, claim_size=st.sampled_from([1, 2, 10]))
    def start_a_subscriber(self, which: int, claim_size: int) -> None:
        self.begin()
        self.start(self.some_groups(which), claim_size)

    @precondition(lambda self: self.has())
    @rule(
        who=WHO,
        how=st.sampled_from(["leave", "cut off", "vanish", "in a handler", "behind a handler"]),
        missed=st.booleans(),
        script=SCRIPT,
    )
    def end_a_subscriber(self, who: int, how: str, missed: bool, script: list[str]) -> None:
        """It leaves as on SIGTERM, and perhaps releases what it cuts off; or it vanishes with all that it holds and has
        not written: in a handler, or behind one, whose transaction has committed if it is atomic."""
        self.begin()
        process = self.pick(who)
        if how == "leave":
            process.leave()
        elif how == "cut off":
            self.cut_off_in_the_handler(process, process.take() or process.step().take())
        elif how != "vanish":
            held = process.take() or process.step().take()
            if held is not None and how == "in a handler":
                self.die_in_the_handler(process, held)
            elif held is not None:
                process.script = list(script)
                call.handle(process.batch_of(held).items, USING)
        self.processes.remove(process)
        if missed:
            self.let_time_pass(LEASE + 1, beats=True)

    def cut_off_in_the_handler(self, process: Process, held: Held | None) -> None:
        """What it was about to do does not count as an attempt."""
        started = None
        if held is not None and not held.is_expired():
            claimed = held.claimed
            if not claimed.suspect or call._record_start(claimed, USING) is None:
                process.begin_all(held)
                started = claimed
        process.cut_off()
        if started is not None and started.suspect and started.ref in self.model.lives:
            self.model.lives[started.ref].counted[started.offset] -= 1

    def die_in_the_handler(self, process: Process, held: Held) -> None:
        if process.is_passed(held):
            return  # the handler is not called
        if held.claimed.suspect and call._record_start(held.claimed, USING) is not None:
            return  # it is another's by now: the handler is not called
        process.begin_all(held)
        if held.claimed.ref not in self.model.lives:
            return
        life = self.model.lives[held.claimed.ref]
        life.lost.add(held.claimed.offset)
        if held.claimed.suspect:
            life.died[held.claimed.offset] = held.claimed.attempt
            wait = life.spec.backoff.delay(held.claimed.attempt)
            life.rests_until[held.claimed.offset] = self.clock.now + round(wait * 1000)

    @precondition(lambda self: self.has())
    @rule(who=WHO, busy=st.integers(0, 2), overtaken=st.booleans())
    def freeze(self, who: int, busy: int, overtaken: bool) -> None:
        """In handlers perhaps; perhaps for so long that others take what it holds."""
        self.begin()
        process = self.pick(who)
        self.take_some(process, busy)
        process.frozen = True
        if overtaken:
            self.overtake()

    def overtake(self) -> None:
        """The leases of those that are frozen run out; the others are in handlers with what they take over."""
        self.let_time_pass(LEASE + 1, beats=True)
        for other in self.processes:
            if not other.frozen:
                self.take_some(other.step(), 1)

    def meanwhile(self, process: Process) -> None:
        """While the handler has an ack in its open transaction, and the row locked (SQLite: and everything)."""
        if self.aside is not None:
            process.frozen = True
            self.aside.submit(self.overtake).result(60)
            process.frozen = False

    @precondition(lambda self: self.has(frozen=True))
    @rule(who=WHO, first=st.sampled_from(["heart", "poller", "handler", "nothing"]), script=SCRIPT)
    def thaw(self, who: int, first: str, script: list[str]) -> None:
        """Any of its threads may be the first to run."""
        self.begin()
        process = self.pick(who, frozen=True)
        process.frozen = False
        process.script = list(script)
        if first == "heart":
            process.beat()
        elif first == "poller":
            process.step()
        elif first == "handler" and process.running:
            process.run(process.running.pop(0))
        elif first == "handler":
            process.work(1)

    @precondition(lambda self: self.has())
    @rule(who=WHO, tick=st.booleans())
    def step(self, who: int, tick: bool) -> None:
        self.begin()
        self.pick(who).step(tick=tick)

    @precondition(lambda self: self.has())
    @rule(who=WHO, tick=st.booleans(), times=st.integers(1, 6), script=SCRIPT, flush=st.booleans())
    def step_and_work(self, who: int, tick: bool, times: int, script: list[str], flush: bool) -> None:
        """Some of it; with ``flush=False`` what was said is not written yet."""
        self.begin()
        process = self.pick(who).step(tick=tick)
        process.script = list(script)
        process.work(times)
        if flush:
            process.flush()

    @precondition(lambda self: self.has())
    @rule(rounds=st.integers(1, 3), script=SCRIPT)
    def all_work(self, rounds: int, script: list[str]) -> None:
        self.begin()
        for process in [process for process in self.processes if not process.frozen] * rounds:
            process.script = list(script)
            process.step()
            process.work()

    @precondition(lambda self: self.has())
    @rule(who=WHO, times=st.integers(1, 3))
    def take(self, who: int, times: int) -> None:
        """Handlers start that take their time."""
        self.begin()
        self.take_some(self.pick(who), times)

    def take_some(self, process: Process, times: int) -> None:
        for _ in range(times):
            held = process.take() or process.step().take()
            if held is not None:
                process.begin_all(held)
                process.running.append(held)

    @precondition(lambda self: self.has())
    @rule(who=WHO, what=st.sampled_from(["work", "flush", "forget its hints", "keep house"]), script=SCRIPT)
    def let(self, who: int, what: str, script: list[str]) -> None:
        """One of its threads alone."""
        self.begin()
        process = self.pick(who)
        if what == "work":
            process.script = list(script)
            process.work(2)
        elif what == "flush":
            process.flush()
        elif what == "forget its hints":
            process.poller.reset()  # as after a database error
        else:
            self.model.may_collect = True
            for _ in process.poller.maintenance.round():
                pass

    @precondition(lambda self: any(one.running for one in self.processes if not one.frozen))
    @rule(who=WHO, which=st.integers(0, 5), script=SCRIPT)
    def finish_one(self, who: int, which: int, script: list[str]) -> None:
        self.begin()
        busy = [process for process in self.processes if process.running and not process.frozen]
        process = busy[who % len(busy)]
        process.script = list(script)
        process.run(process.running.pop(which % len(process.running)))

    @rule(seconds=st.sampled_from([1, LATER, RENEWAL, VISIBILITY + 1, LEASE + 1]), beats=st.booleans())
    def pass_time(self, seconds: float, beats: bool) -> None:
        """``beats=False``: the database stands still for everybody, so no heart beats."""
        self.begin()
        self.let_time_pass(seconds, beats=beats)

    def let_time_pass(self, seconds: float, *, beats: bool) -> None:
        while seconds > 0:
            self.clock.move(int(min(seconds, RENEWAL) * 1000))
            seconds -= RENEWAL
            for process in self.processes:
                if beats and not process.frozen:
                    process.progress.made()  # it turns, and finds nothing
                    process.beat()
        self.model.now = self.clock.now

    @rule(
        what=st.sampled_from(RARE),
        which=st.integers(0, len(SPECS) - 1),
        start=st.sampled_from(["earliest", "latest"]),
    )
    def operate(self, what: str, which: int, start: str) -> None:
        """What is rare; one rule, so that it is not drawn more often than the others."""
        self.begin()
        ref = SPECS[which].ref
        if what == "late":
            self.register(LATE, start)
        elif what in ("pause", "resume"):
            ConsumerGroup.objects.filter(consumer_group=ref.group, topic=ref.topic).update(paused=what == "pause")
        elif what == "drop" and ref in self.model.lives:
            dropping.drop(USING, ref, actor="test")
            self.model.dropped(ref)
            for process in self.processes:
                process.outdated.add(ref)
        elif what == "register" and ref != LATE:
            self.register(ref, start)
        elif what in ("override", "restore") and ref in self.model.lives:
            values = {"claim_size": 1 + which % 3, "prefetch": 1 + which, "poll_interval": 0.5}
            values |= {"max_in_flight": 3 + which, "max_in_flight_per_key": 2, "rate_per_key": "9000/s"}
            changes = (values, ()) if what == "override" else ({}, values)
            group_settings.override(USING, ref, lambda _: changes, check=lambda found: None, actor="operator")
        elif what == "give up" and ref in self.model.lives:
            self.give_up(ref)
        elif what in ("retry", "retry later") and ref in self.model.lives:
            due = self.clock.now + LATER * 1000 if what == "retry later" else 0
            retrying.make_due(USING, ref, actor="operator", due=due)
            self.model.lives[ref].rests_until.clear()
        elif what == "collect":
            self.model.may_collect = True
            garbage.collect(USING)
        elif what == "clock":
            self.clock.hours_off = which - 3

    @rule(
        which=st.integers(1, 2 ** len(SPECS) - 1),
        how=st.sampled_from(["register", "override", "restore"]),
        policy=st.sampled_from([EU, US, US, None]),
    )
    def change_filters(self, which: int, how: str, policy: FilterPolicy | None) -> None:
        """From now on, nothing is passed or claimed under the ones before, whatever the subscribers remember."""
        self.begin()
        for bit, spec in enumerate(SPECS):
            if which & 1 << bit and spec.ref in self.model.lives:
                self.change_filter(self.model.lives[spec.ref], how, policy)

    def change_filter(self, life: Life, how: str, policy: FilterPolicy | None) -> None:
        ref = life.spec.ref
        if how == "register":
            found = {} if policy is None else policy.as_json()
            is_other = policy != life.registered_filter
            assert groups.register_options(USING, ref, "filter", found, actor="migrate") == is_other
            life.registered_filter = policy
        else:
            life.overrides = {"filter": policy} if how == "override" else {}
            changes = (life.overrides, () if life.overrides else ("filter",))
            group_settings.override(USING, ref, lambda _: changes, check=lambda found: None, actor="operator")
        life.had_filters = life.had_filters or life.filter is not None

    def give_up(self, ref: GroupRef) -> None:
        """An operator dead-letters the first message that is not in the hands of a live subscriber."""
        life = self.model.lives[ref]
        alive = {process.name for process in self.processes if process.heart.good()}
        unsettled = DeliveryState.objects.filter(consumer_group=ref.group, topic=ref.topic, acked=False)
        rows = unsettled.order_by("message_offset").values_list("message_offset", "delivered_by", "delivery_token")
        for offset, by, token in rows:
            holder = by if token else ""
            try:
                dead_letter_now(USING, ref, [offset], actor="operator")
            except OperationRefused as error:
                assert f"is in flight at the live subscriber {holder!r}" in str(error)  # noqa: PT017
                continue
            assert holder not in alive, f"{ref}[{offset}] was given up while {holder} held it"
            life.given_up.add(offset)
            return

    # -- what must hold -------------------------------------------------------

    @invariant()
    def the_overview_counts_what_is_there(self) -> None:
        for ref in self.model.lives if self.model.step else ():
            overview = get_overview(group=ref.group, topic=ref.topic, using=USING)
            (shown,) = overview.groups
            life = self.model.lives[ref]
            if life.had_filters or life.passed:
                count, oldest = oracle.unsettled_beside_passed(Tables.read(USING), ref)
            else:
                count, oldest = oracle.unsettled(Session(USING), ref)
            due = OutboxMessage.objects.filter(topic=ref.topic, deliver_at__lte=overview.now)
            waiting = [
                max(created_at if deliver_at <= 0 else deliver_at, shown.registered_at, shown.sought_at)
                for created_at, deliver_at in due.values_list("created_at", "deliver_at")
            ]
            first = min([*waiting, *([] if oldest is None else [oldest])], default=None)
            assert (shown.lag.value, shown.oldest_at) == (count, first), ref
            assert not shown.live or shown.lag.exact
            listing = list_partitions(group=ref.group, topic=ref.topic, using=USING, limit=1000)
            lags = {one.key: one.lag for one in listing.partitions if one.lag}
            backlogs = backlogs_of(*ref, using=USING)
            assert backlogs is not None
            assert lags == {key: lag for key, lag in backlogs.lags.items() if lag}, ref
            ages = [one.oldest_at for one in listing.partitions if one.oldest_at is not None]
            assert (sum(lag.value for lag in lags.values()), min(ages, default=None)) == (count, oldest), ref

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not self.model.step:
            return  # before anything is there
        now = self.model.check()
        for process in self.processes:
            if process.frozen or not process.heart.good():
                continue
            for work in process.poller.ordered:
                for key in work.mode.owned():
                    owner = now.leases.get((work.ref, key))
                    assert owner == process.name or work.ref in process.outdated, (
                        f"4: {process.name} believes that it holds {work.ref} {key}, which is {owner!r}'s"
                    )
        self.sound = True

    def teardown(self) -> None:
        for publisher in self.publishers:
            if publisher.is_open:
                publisher.end(commit=False)
        if self.sound and self.model.step:
            self.drain()
        super().teardown()

    def drain(self) -> None:
        """A healthy subscriber settles everything, and nothing stays behind."""
        self.drain_the_other()
        if not self.model.lives:
            return
        self.processes.clear()
        ConsumerGroup.objects.update(paused=False)
        self.begin()
        self.clock.move(int(LEASE * 1000))
        healthy = self.start(list(self.model.lives))
        for _ in range(30):
            self.begin()
            self.clock.move(int(RENEWAL * 1000))
            self.model.now = self.clock.now
            healthy.beat()
            healthy.settle()
            self.agrees_with_the_model()
            self.begin()
            self.model.may_collect = True
            for _ in healthy.poller.maintenance.round():
                pass
            self.agrees_with_the_model()
            if not any(model.objects.exists() for model in (OutboxMessage, DeliveryState, PartitionLease)):
                break
        end = Tables.read(USING)
        assert not invariants.drained(end)
        assert not end.outbox, "nothing is scheduled for so long"
        for ref, life in self.model.lives.items():
            assert lag(ref.group, ref.topic) == 0, f"lag of {ref}"
            missing = life.expected.keys() - life.settled
            assert not missing, f"1: {ref} never got {missing}"
        self.drain_the_other()
