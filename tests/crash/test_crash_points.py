"""Every operation of the service layer, ended at every statement that it sends.

What has happened is then all of it or nothing, a healthy subscriber handles
what is left, and nothing is lost, handled twice or left behind. A new operation
gets a case in ``crash_cases``; ``test_every_function_that_writes_has_a_case``
asks for it.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from django.db import OperationalError, connections
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.models import Operation, QueueMessage, Schedule
from django_mysqlqueue.operations import import_celery_beat, recurring, seeking, steps
from django_mysqlqueue.operations.seeking import Position
from tests.app.models import Effect
from tests.conftest import Clock, empty
from tests.crash import coalescing as _coalescing  # noqa: F401  # It adds cases.
from tests.crash import debouncing as _debouncing  # noqa: F401  # It adds cases.
from tests.crash.acts import ACTS, begin
from tests.crash.audit import Observer, Picture
from tests.crash.cases import CASES, Case, resume, undo
from tests.crash.crashes import ALIAS, CUT, ENDS, GONE, KILL, LATE, LOST, MODES, STAYS, TOPIC, Ended
from tests.crash.worlds import OTHER, G, World
from tests.support import beat_tables, draining, invariants, job_worlds, schedule_worlds
from tests.support.filtering import filter_of, has_expired, is_superseded, is_superseding, matches
from tests.support.harness import USING, Sub, handler
from tests.support.internals import GroupRef, audit, drop_connection, groups, packets_of, use_packets
from tests.support.snapshots import Snapshot
from tests.support.tables import Tables
from tests.support.writers import watched, writing_functions

DRAINED: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
"""By case, the rows that healthy subscribers have handled. The same rows come to the same end, whatever has ended the
operation, so each are handled once."""


class Start:
    """A case's set-up: run once, then put back as it was."""

    def __init__(self, one: Case, mode: str = "") -> None:
        self._setup, self._operation = one.setup, one.operation
        # What a subscriber has in its memory changes with what it does, unless that is done by a process that dies.
        self._remembers = mode in (KILL, GONE)
        self.world = self._run()
        self._snapshot = Snapshot()
        self._observer = Observer()
        self.picture = self._observer.read()

    def _run(self) -> World:
        empty()
        world = self._setup()
        if world.sub is not None:
            world.sub.use(ALIAS)
        return world

    def end(self) -> Picture:
        """How it ends if nothing happens to it."""
        self._operation(self.world)
        drop_connection(connections[ALIAS])
        end = Observer().read()
        if self.world.sub is not None and self._remembers:
            self.world, self._observer, self.picture = self._anew()
            self._snapshot = Snapshot()
        return end

    def again(self) -> tuple[World, Observer, Picture]:
        if self.world.sub is None or self._remembers:
            self._snapshot.restore()
            return self.world, copy.copy(self._observer), self.picture
        return self._anew()

    def _anew(self) -> tuple[World, Observer, Picture]:
        world, observer = self._run(), Observer()
        picture = observer.read()
        assert picture.tables == self.picture.tables, "the set-up is not always the same"
        return world, observer, picture


# -- running them -------------------------------------------------------------


@pytest.mark.promise(
    "Delivery", "Filters", "Exactly-once effects", "Dead letters", "Crashes", "Cancelling", "Quarantine"
)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name, one in CASES.items()
        for mode in (MODES if one.lives else ENDS)
        if mode != KILL or not one.lives
    ],
)
def test_ended_at_every_statement(db, crasher, name, mode):
    one = CASES[name]
    start = Start(one, mode)
    assert not start.picture.broken
    after = start.end()
    for number in itertools.count(1):
        try:
            ended = once(one, mode, number, crasher, start, after)
        except BaseException as error:
            error.add_note(f"{name}, {mode}, statement {number}")
            raise
        if not ended.stopped:
            break
    assert number > 1 or mode == LOST


TOGETHER = (
    "sequence",
    "sequence priorities",
    "sequence what the log refuses",
    "acquire",
    "claim",
    "claim and flush",
    "claim what a vanished subscriber held",
    "claim, shared",
    "claim with a filter and look deeper, ordered",
    "claim and release slots",
    "flush all kinds",
    "flush all kinds, shared",
    "sweep",
)
"""Operations that send several statements in a packet in a subscriber."""


@pytest.mark.promise("Crashes")
@pytest.mark.servers_only
@pytest.mark.parametrize("mode", ENDS)
@pytest.mark.parametrize("name", TOGETHER)
def test_ended_between_two_statements_of_a_packet(db, crasher, name, mode):
    one = CASES[name]
    start = Start(one, mode)
    after = start.end()
    for number in itertools.count(1):
        try:
            ended = once(one, mode, number, crasher, start, after, packets=True)
        except BaseException as error:
            error.add_note(f"{name}, {mode}, statement {number}")
            raise
        if not ended.stopped:
            break
    assert number > 1
    world, _, _ = start.again()
    use_packets(connections[ALIAS])
    with CaptureQueriesContext(connections[ALIAS]) as sent:
        packets_of(connections[ALIAS]).is_usable = True
        one.operation(world)
    several = sum("; " in query["sql"] for query in sent)
    drop_connection(connections[ALIAS])
    del connections[ALIAS]
    assert several


@pytest.mark.promise("Crashes", "Exactly-once effects")
@pytest.mark.servers_only
@pytest.mark.parametrize("mode", ENDS)
@pytest.mark.parametrize("name", [name for name, one in CASES.items() if one.atomic])
def test_ended_between_an_ack_and_its_commit(db, crasher, name, mode):
    """In the thread of a handler, they are sent together."""
    one = CASES[name]
    start = Start(one, mode)
    after = start.end()
    for number in itertools.count(1):
        try:
            ended = once(one, mode, number, crasher, start, after, ends_together=True)
        except BaseException as error:
            error.add_note(f"{name}, {mode}, statement {number}")
            raise
        if not ended.stopped:
            break
    assert number > 1


@pytest.mark.promise("Crashes")
@pytest.mark.skipif(CUT in MODES, reason="there the connection is cut at every statement")
@pytest.mark.parametrize("name", [name for name, one in CASES.items() if one.lives])
def test_a_process_outlives_every_failed_statement(db, crasher, name):
    """Where there is no connection to cut: what it took out of the inbox and could not write is written later."""
    one = CASES[name]
    start = Start(one)
    after = start.end()
    for number in itertools.count(1):
        world, observer, _ = start.again()
        sent: list[str] = []

        def fail(execute, sql, params, many, context, number=number, sent=sent):
            sent.append(sql)
            if len(sent) == number:
                raise OperationalError("no answer")
            return execute(sql, params, many, context)

        failed = False
        with connections[ALIAS].execute_wrapper(fail):
            try:
                one.operation(world)
            except OperationalError:
                failed = True
        assert failed == (number <= len(sent)), "the error was swallowed"
        if not failed:
            break
        assert one.again is not None
        one.again(world)
        drop_connection(connections[ALIAS])
        here = observer.read()
        if one.again is one.operation:
            assert here.tables == after.tables, "run again it has not come to the same"
        if one.check is not None:
            one.check(world, here)
        if here.tables not in DRAINED[name]:
            done = drain(one, world)
            check_drained(one, world, here, observer.read(), done)
            DRAINED[name].append(here.tables)
    assert number > 5


def once(
    one: Case,
    mode: str,
    number: int,
    crasher: Any,
    start: Start,
    after: Picture,
    **options: Any,
) -> Ended:
    """One run that is stopped at a statement, and all that follows."""
    world, observer, first = start.again()
    ended: Ended = crasher.run(mode, number, lambda: one.operation(world), **options)
    if not ended.stopped and mode != KILL:
        assert ended.error is None
        return ended
    try:
        there = observer.read()
        check_step(one, mode, first, there)
        check_outcome(one, ended, there, first, after)
        then = one.again if mode != KILL else one.operation if one.rerun else None
        here = there
        if then is not None:
            then(world)
            drop_connection(connections[ALIAS])
            here = observer.read()
            check_step(one, mode, there, here)
        if then is one.operation and one.commits == 1:
            assert here.tables == after.tables, "run again it has not come to the same"
        if one.check is not None:
            one.check(world, here)
        if here.tables not in DRAINED[one.name]:
            done = drain(one, world)
            check_drained(one, world, here, observer.read(), done)
            DRAINED[one.name].append(here.tables)
    except AssertionError as error:
        error.add_note("sent: " + "\n  ".join(text[:300] for text in ended.sent))
        error.add_note(f"raised: {ended.error!r}")
        raise
    return ended


OUTLIVED = (
    "publish with a row",
    "publish and once more with the same id",
    "cancel with a row",
    "reschedule with a row",
    "sequence",
    "sequence what the log refuses",
    "acquire by theft",
    "claim",
    "claim and flush",
    "claim, shared",
    "claim with a filter and look deeper, ordered",
    "claim what a vanished subscriber held",
    "flush all kinds",
    "flush all kinds, shared",
    "an atomic handler, ordered",
    "an atomic handler, shared",
    "a turn that writes and claims, shared",
)
"""What a process does again while its old session lives on."""
ARRIVES = (*OUTLIVED, "a turn that writes and claims, ordered", "a turn that dead-letters a batch", "the last flush")
"""Of which the COMMIT arrives late."""
INHERITED = (
    "publish with a row",
    "cancel with a row",
    "reschedule with a row",
    "sequence",
    "sequence what the log refuses",
    "claim and flush",
    "claim, shared",
    "flush all kinds, shared",
    "an atomic handler, ordered",
)
"""Where others meet the locks of a host that is gone."""
IN_NOBODYS_WAY = (
    "publish with a row",
    "publish and once more with the same id",
    "cancel with a row",
    "reschedule with a row",
    "sequence",
    "sequence what the log refuses",
)
"""A long transaction delays only its own messages; who does not get the mutex goes on."""
LINGERING = [(name, mode) for mode, names in ((STAYS, OUTLIVED), (LATE, ARRIVES), (GONE, INHERITED)) for name in names]


@pytest.mark.promise("Crashes", "Cancelling")
@pytest.mark.servers_only
@pytest.mark.own_server
@pytest.mark.parametrize(("name", "mode"), LINGERING)
def test_the_servers_session_lives_on(db, crasher, name, mode):
    """The server has not noticed that the client is gone: what the session has locked is locked still.

    Whoever waits for it ends it, as a time-out would.
    """
    one = CASES[name]
    start = Start(one, mode)
    after = start.end()
    for number in itertools.count(1):
        world, observer, first = start.again()
        ended = crasher.run(mode, number, lambda world=world: one.operation(world))
        if not ended.stopped:
            break
        try:
            outlive(one, mode, ended, crasher, world, observer, first, after)
        except BaseException as error:
            error.add_note(f"{name}, {mode}, statement {number}: {ended.error!r}, sent: " + "\n  ".join(ended.sent))
            raise
        finally:
            waited_for = crasher.release()
        assert not (waited_for and name in IN_NOBODYS_WAY), f"somebody has waited ({mode}, statement {number})"
    assert number > 1


def outlive(
    one: Case, mode: str, ended: Ended, crasher: Any, world: World, observer: Observer, first: Picture, after: Picture
) -> None:
    """What a process does while its old session lives on, and afterwards; if the process is gone, what others do."""
    here = observer.read()
    check_step(one, mode, first, here)
    check_outcome(one, ended, here, first, after)
    release = crasher.release
    if one.again is not None and mode != GONE:
        (one.again if one.again in (undo, one.operation) else resume)(world)
        release()
        if one.again is not undo:  # that has waited; the others may have passed over what was locked
            one.again(world)
        drop_connection(connections[ALIAS])
        there, here = here, observer.read()
        check_step(one, mode, there, here)
        if one.again is one.operation and one.commits == 1:
            assert here.tables == after.tables, "run again it has not come to the same"
        if one.check is not None:
            one.check(world, here)
        release = None
    is_over = mode == STAYS and release is None
    if is_over and here.tables in DRAINED[one.name]:
        return
    done = drain(one, world, release)
    end = observer.read()
    if mode == LATE:
        for name in one.cancels:  # the others were there when its message came due, and passed over it
            here.messages.pop(name, None)
    check_drained(one, world, here, end, done)
    if is_over:
        DRAINED[one.name].append(here.tables)
    if one.again is None and mode == LATE:
        assert end.messages == after.messages, "it has arrived and is not there"


def check_step(one: Case, mode: str, earlier: Picture, later: Picture) -> None:
    """What holds after anything at all."""
    assert not later.broken
    check_between(one, earlier, later)
    for group, name in later.letters:
        assert group == "g"
        assert name in one.dead
    # An atomic handler whose connection ends has failed.
    if mode in (KILL, GONE) or not one.atomic:
        for (group, name), count in later.failures.items():
            lost = count - earlier.failures.get((group, name), 0)
            assert lost <= 0 or (group == "g" and name in one.fails), f"{name} has lost an attempt"
    for group, name in later.settled - earlier.settled:
        assert name not in one.dead or group != "g" or later.letters[group, name], f"{name} is neither live nor dead"
    # What it deletes was settled before: no operation does both.
    deleted = earlier.messages.keys() - later.messages.keys() - set(one.cancels) - later.aside
    assert all((group, name) in earlier.settled for name in deleted for group in ("g", "other"))


def check_between(one: Case, earlier: Picture, later: Picture, *, bystander: bool = True) -> None:
    """``bystander``: nobody has worked for the other group meanwhile."""
    assert not invariants.between(
        earlier.rows,
        later.rows,
        forgets=one.forgets,
        deletes=one.cancels,
        untouched=(OTHER,) if bystander and one.name != "collect" else (),
    )


def check_outcome(one: Case, ended: Ended, there: Picture, before: Picture, after: Picture) -> None:
    """What has happened is all of it or nothing, and what was reported is true."""
    if one.commits is None:
        return
    if ended.committed is None:
        assert there.tables in (before.tables, after.tables)
    else:
        assert there.tables == (after if ended.committed else before).tables
    if not ended.stopped:
        assert there.tables == after.tables, "it returned, and was undone"
    if ended.error is not None and not one.unsure and not isinstance(ended.error, CommitOutcomeUnknown):
        assert there.tables == before.tables, "it failed, and had been done"


def drain(one: Case, world: World, release: Callable[[], object] | None = None) -> list[tuple[str, str, int]]:
    """An hour later a healthy subscriber of both groups handles what there is; returns (group, message, attempt).

    ``release`` ends what has locked something: first it handles what it can get, then the rest.
    """
    done: list[tuple[str, str, int]] = []

    def note(delivery: Any) -> None:
        done.append((delivery.group, delivery.payload, delivery.attempt))
        if one.atomic and delivery.group == "g":
            Effect.objects.create(name=delivery.payload)

    known = groups.find(USING, G)
    handlers = (
        handler(
            function=note,
            mode=known.mode if known is not None else world.mode,
            atomic=one.atomic,
            on_failure="block" if world.strict else "skip",
        ),
        handler(group="other", function=note),
    )
    clock = Clock()
    clock.advance(3700)
    try:
        healthy = Sub(*handlers, lease_renewal_interval=0.0, name="healthy", limits=draining.IMPATIENT)
        before, forgets = Tables.read(USING), one.forgets

        def check() -> None:
            nonlocal before, forgets
            now = Tables.read(USING)
            assert not invariants.at_any_moment(now)
            assert not invariants.between(before, now, forgets=forgets, deletes=one.cancels)
            before, forgets = now, ()

        draining.handle_all(healthy, done, check)
        if release is not None:
            release()
            draining.handle_all(healthy, done, check)
        draining.keep_house(healthy)
    finally:
        clock.restore()
    return done


def is_for_handlers(there: Picture, ref: GroupRef, name: str) -> bool:
    """Whether the group has to handle a message that it has not settled.

    It has not expired, no later one supersedes it, and it matches the filter, or was claimed under an earlier one.
    """
    found = [one for one in invariants.messages(there.rows) if one.topic == ref.topic and one.id == name]
    if not found:
        return True  # it has arrived since
    claimed = {offset for of, _, offset in there.rows.state if of == ref}
    policy = filter_of(there.rows.groups[ref]) if ref in there.rows.groups else None
    mine = [
        one
        for one in found
        if invariants.is_for(one, ref) and not has_expired(one) and not is_superseded(one, there.rows, ref)
    ]
    return any(
        getattr(one, "offset", 0) in claimed or matches(one, policy) or is_superseding(one, there.rows, ref)
        for one in mine
    )


def check_drained(one: Case, world: World, there: Picture, end: Picture, done: list[tuple[str, str, int]]) -> None:
    """Each group has handled what it had not settled, once, in order; nothing is left."""
    assert not end.broken
    assert not invariants.drained(end.rows, idle=end.rows.groups.keys() - {G, OTHER})
    check_between(one, there, end, bystander=False)
    handled = Counter((group, name) for group, name, _ in done)
    for group in ("g", "other"):
        for name in end.messages.keys() | there.messages.keys():
            settled = (group, name) in there.settled and not (G in one.forgets and group == G.group)
            letters = end.letters[group, name] - there.letters[group, name]
            gets = not settled and name not in end.aside and is_for_handlers(there, GroupRef(group, TOPIC), name)
            assert handled[group, name] + letters == gets, f"{name} by {group}"
        if world.mode == "ordered" or group == "other":
            partitions = dict(QueueMessage.objects.values_list("message_id", "partition_key"))
            for key in {"a", "b", *partitions.values()}:
                order = [name for by, name, _ in done if by == group and partitions.get(name, name[0]) == key]
                assert order == sorted(order), "out of order"
    for group, name, attempt in done:
        failed = 0 if G in one.forgets else there.failures.get((group, name), 0)
        assert attempt == failed + 1, f"{name} has lost an attempt"
    assert all(count == 1 for count in end.messages.values())
    assert {name for _, name in end.letters} <= set(one.dead)
    assert not end.tables["outbox"], "an hour later everything is due"
    assert not any(group.paused for group in end.rows.groups.values())
    if one.atomic:
        effects = Counter(end.tables["effects"])
        for name in end.messages:
            assert effects[name] + end.letters["g", name] == 1, f"{name} took effect {effects[name]} times"


# -- nothing is left out ------------------------------------------------------


@pytest.mark.promise("Crashes")
@pytest.mark.any_engine
@pytest.mark.any_version
def test_every_function_that_writes_has_a_case(db, crasher, monkeypatch):
    seen: set[str] = set()
    required = writing_functions()
    assert len(required) > 150
    for one in CASES.values():
        world = Start(one).world
        with watched(seen, [connections[ALIAS]]):
            one.operation(world)
    for act in ACTS.values():
        begin(act)
        with watched(seen, [connections[ALIAS]]):
            act.run()
    for change in job_worlds.CHANGES.values():
        empty()
        held = change.setup()
        with watched(seen, [connections[ALIAS]]):
            change.make(ALIAS, held)
            job_worlds.enqueue(ALIAS)
            job_worlds.enqueue_chain(ALIAS)
    # tests/schedules/test_crashes.py ends these at every statement.
    for made in schedule_worlds.CHANGES.values():
        empty()
        made.setup()
        with watched(seen, [connections[ALIAS]]):
            made.make(ALIAS)
    with watched(seen, [connections[ALIAS]]):
        schedule_worlds.publish_now(ALIAS)
        for call in (recurring.pause_recurring, recurring.resume_recurring, recurring.delete_recurring):
            Schedule.objects.update(seen_at=0)
            call(schedule_worlds.NAME, actor="test", using=ALIAS)
        with job_worlds.configured():
            name = schedule_worlds.NAME
            recurring.create_recurring(name, job_worlds.PATH, every=60, actor="test", using=ALIAS)
            recurring.update_recurring(name, args=[2], actor="test", using=ALIAS)
    # It reads tables of others, and creates each schedule as above.
    with beat_tables.there(), watched(seen, [connections[ALIAS]]):
        import_celery_beat(actor="test", using=ALIAS)
    # An operation that waits, and that another one has stopped.
    monkeypatch.setattr(audit, "BEAT_SECONDS", 0)
    groups.register(USING, G, mode="ordered", start="earliest")
    operation = groups.run(USING, lambda session: seeking._begin(session, G, Position(0), "", actor="stopped"))
    with watched(seen, [connections[ALIAS]]):
        audit.beats(ALIAS, operation)()
    assert Operation.objects.get(pk=operation).progress_at
    with watched(seen, [connections[ALIAS]]), pytest.raises(steps.Stopped), audit.stopping(ALIAS, operation):
        steps.refuse_stopped(G, operation, None)
    assert Operation.objects.get(pk=operation).ended_at
    assert required - seen == set()
