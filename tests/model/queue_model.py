"""What the queue must look like: a model in plain Python, compared with the tables after every step.

It knows what was committed, in which order, and what each handler said of each
delivery. From that follows what a group may have settled, what must still be
alive or in the DLQ, and what may start next. Numbers are those of the design's
invariants.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.models import DeliveryState, PartitionLease
from django_mysqlqueue.names.keys import priority_of
from django_mysqlqueue.names.rules import relay_target
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.topics import is_dlq
from tests.support import invariants, refusing
from tests.support.filtering import coalesced, matches
from tests.support.internals import NO_WAIT, Claimed, GroupRef
from tests.support.invariants import Message
from tests.support.tables import Logged, State, Tables

RETENTION = 20
"""Seconds that the log keeps what every group has passed."""
ORPHAN_RETENTION = 45
"""Seconds that it keeps the messages of a topic without a group."""


@dataclass(frozen=True)
class Spec:
    """A group as the tests declare it."""

    ref: GroupRef
    mode: str = "ordered"
    on_failure: str = "skip"
    atomic: bool = False
    batch_size: int = 0
    """0: the handler takes single messages."""
    max_attempts: int = 3
    backoff: Backoff = NO_WAIT

    @property
    def ordered(self) -> bool:
        return self.mode == "ordered"


@dataclass(frozen=True)
class Published:
    """A message of a publisher's transaction; its payload is its number."""

    number: int
    topic: str
    key: str
    id: str
    due: int
    """By the database's clock; 0: at once."""
    began: int
    """The step at which it was published, and (below) at which that was committed."""
    committed: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    expires: int = 0
    """By the database's clock; 0: never."""
    coalesce: str = ""

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.topic, self.key, self.id

    @property
    def debounces(self) -> tuple[str, str, str] | None:
        """Topic, key and coalesce key, if it is debounced: of such messages the latest remains."""
        return (self.topic, self.key, self.coalesce) if self.coalesce and self.due else None


@dataclass(frozen=True)
class Verdict:
    """What a handler said of a delivery, whether or not that was ever written."""

    token: int
    kind: str
    attempt: int
    step: int


@dataclass
class Life:
    """A group from its registration until it is dropped."""

    spec: Spec
    start_offset: int
    effects_before: int
    """The last effect of an earlier life."""
    expected: dict[int, str] = field(default_factory=dict)
    """Offset → partition key of what it must handle and the log still holds."""
    started: dict[int, str] = field(default_factory=dict)
    """Offset → partition key of what has been started, in the order of the first starts."""
    settled: set[int] = field(default_factory=set)
    letters: dict[int, str] = field(default_factory=dict)
    """Offset → the id of its dead letter."""
    verdicts: dict[int, list[Verdict]] = field(default_factory=dict)
    counted: Counter[int] = field(default_factory=Counter)
    """At most so many attempts can have been counted."""
    died: dict[int, int] = field(default_factory=dict)
    """The attempt that was on record when its process died inside the handler."""
    rests_until: dict[int, int] = field(default_factory=dict)
    """The earliest time of its next start after that, by the database's clock."""
    lost: set[int] = field(default_factory=set)
    """Offsets whose process died inside the handler, and of which no handler has said anything since."""
    tokens: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    """What an operator has dead-lettered."""
    registered_filter: FilterPolicy | None = None
    overrides: dict[str, FilterPolicy | None] = field(default_factory=dict)
    """The override of the filter, if there is one."""
    had_filters: bool = False
    claimed: set[int] = field(default_factory=set)
    """Offsets that have, or have had, a state row."""
    passed: set[int] = field(default_factory=set)
    """Offsets that the position has passed under a filter that did not match them, or after they had expired."""
    noted: set[int] = field(default_factory=set)
    """Offsets for which the group has given up earlier messages of their coalesce keys: they pass any filter."""

    @property
    def filter(self) -> FilterPolicy | None:
        """The one that counts. A step changes it or claims, never both."""
        return self.overrides.get("filter", self.registered_filter)


def number_of(message: Message) -> Any:
    """Its payload."""
    return json.loads(message.payload)


def effects(tables: Tables) -> list[tuple[int, GroupRef, int]]:
    """What atomic handlers have written: its number, group, offset."""
    return [(one.id, GroupRef(*one.name.split("|")), one.value) for one in tables.effects]


class Model:
    """What was done so far, and the comparison with the tables."""

    def __init__(self, specs: list[Spec]) -> None:
        self.specs = {spec.ref: spec for spec in specs}
        self.now = 0
        """The database's clock, milliseconds."""
        self.step = 0
        self.may_collect = False
        """The present step may run GC."""
        self.committed: dict[int, Published] = {}
        self.logged: dict[int, Logged] = {}
        """Everything that was ever in the log."""
        self.log_end = 0
        """The last offset when the present step began."""
        self.entering: dict[str, str] = {}
        """Topic → the topic under which its messages enter the log, if that is another one."""
        self.moves = False
        """A route leads to another database."""
        self.arrived = 0
        """What is for another database has arrived there up to this offset."""
        self.sequenced: set[int] = set()
        self.identities: set[tuple[str, str, str]] = set()
        self.cancelled: set[int] = set()
        self.refused = 0
        """How many messages that the log refuses are in the outbox and the quarantine."""
        self.lives: dict[GroupRef, Life] = {}
        self.old_tokens: set[int] = set()
        """Of groups that have been dropped since."""
        self.began_at: dict[GroupRef, int] = {}
        """Just before each group was registered, by the clock that the model moves."""
        self.letters: set[str] = set()
        self.problems: list[BaseException] = []
        """What was found inside a handler, where raising means something else."""
        self.before = Tables.read()

    # -- what happens ---------------------------------------------------------

    def commit(self, messages: list[Published]) -> None:
        for one in messages:
            self.committed[one.number] = Published(**{**one.__dict__, "committed": self.step})

    def scheduled(self, topic: str, id: str) -> list[Published]:
        """What is committed, bears the id and has not come due."""
        there = {number_of(row) for row in Tables.read().outbox if not row.failed_group}
        return [
            one
            for number, one in self.committed.items()
            if (one.topic, one.id) == (topic, id)
            and one.due > self.now
            and number not in self.cancelled
            and (number in there or not self._is_replaced(one))
        ]

    def cancel(self, messages: list[Published]) -> None:
        self.cancelled |= {one.number for one in messages}

    def registered(self, ref: GroupRef) -> None:
        """The group exists from now on (it may have existed before)."""
        if ref in self.lives:
            return
        now = Tables.read()
        self.began_at[ref] = self.now - 1
        self.read_log(now)
        start = now.groups[ref].start_offset
        life = self.lives[ref] = Life(self.specs[ref], start, max((one.id for one in now.effects), default=0))
        life.expected = {
            offset: one.key for offset, one in now.log.items() if one.topic == ref.topic and offset > start
        }

    def dropped(self, ref: GroupRef) -> None:
        self.old_tokens |= self.lives.pop(ref).tokens
        # What it had settled or held says nothing about its next life.
        self.before = Tables.read()

    def start(self, who: str, ended: set[tuple[GroupRef, int, int]], claimed: Claimed, number: Any) -> Life | None:
        """A handler starts; None where the group was dropped since this was claimed: then nothing may come of it."""
        ref, offset = claimed.ref, claimed.offset
        life = self.lives.get(ref)
        row = (
            DeliveryState.objects.filter(consumer_group=ref.group, topic=ref.topic, partition_key=claimed.key)
            .filter(message_offset=offset)
            .values_list("delivery_token", "acked")
            .first()
        )
        if life is None or (row != (claimed.token, False) and claimed.token in self.old_tokens):
            return None
        about = f"{ref}[{offset}], attempt {claimed.attempt}, by {who}"
        assert row == (claimed.token, False), f"4: a delivery started that was no longer its holder's: {about}, {row}"
        life.tokens.add(claimed.token)
        # What has been appended in this step may supersede this message, or one before it.
        if offset not in life.expected or any(one.coalesce for one in self.committed.values()):
            self.read_log(Tables.read())
        assert life.expected.get(offset) == claimed.key, f"1: started, but never published to it: {about}"
        assert number == number_of(self.logged[offset]), f"another message's payload: {about}"
        self._check_attempt(life, claimed, about)
        self._claim(life, offset, about)
        assert not self._has_expired(offset), f"expiry: started after it had expired: {about}"
        assert not self._is_superseded(life, offset), f"coalescing: started after it was superseded: {about}"
        if life.spec.ordered:
            owner = PartitionLease.objects.filter(
                consumer_group=ref.group, topic=ref.topic, partition_key=claimed.key
            ).values_list("leased_by", flat=True)
            assert list(owner) == [who], f"4: started without the lease: {about}, held by {list(owner)}"
            self._check_order(life, claimed, about)
            self._check_lost(life, claimed, about)
            if life.spec.on_failure == "block":
                self._check_strict_order(life, claimed, ended, about)
        life.started.setdefault(offset, claimed.key)
        life.counted[offset] += claimed.suspect
        return life

    def _has_expired(self, offset: int) -> bool:
        """Whether the time of its expiry has come. A copy, such as a dead letter, does not expire."""
        row = self.logged[offset]
        expires = None if row.original_id or row.target_group else row.expires_at
        return expires is not None and self.now >= expires

    def _is_superseded(self, life: Life, offset: int) -> bool:
        """Whether the last message of the log with its coalesce key is another one, which the group gets for sure."""
        latest = self._coalesced_after(offset)[-1:]
        return self._supersedes(life, [one for one in latest if not self._has_expired(one)])

    def _was_superseded(self, life: Life, offset: int) -> bool:
        """Whether that was so at any moment of this step, in which others may have come after that one."""
        later = self._coalesced_after(offset)
        was_last = [one for one, follower in pairwise([*later, self.log_end + 1]) if follower > self.log_end]
        return self._supersedes(life, was_last)

    def _coalesced_after(self, offset: int) -> list[int]:
        key = coalesced(self.logged[offset])
        return sorted(one for one, row in self.logged.items() if one > offset and key and coalesced(row) == key)

    def _supersedes(self, life: Life, offsets: list[int]) -> bool:
        return any(self._gets(life, offset) for offset in offsets)

    def _gets(self, life: Life, offset: int) -> bool:
        """Whether the group gets a message, or has got it. What expires may be passed in this step."""
        if offset in life.claimed:
            return True
        may_get = offset not in life.passed or self._has_expired(offset)
        return may_get and self._matches(life, offset)

    def _matches(self, life: Life, offset: int) -> bool:
        """Whether the group's filter lets a message through now."""
        return matches(self.logged[offset], life.filter) or offset in life.noted

    def _gave_up(self, life: Life, offset: int) -> None:
        """A message was superseded: a later one is the group's, whatever becomes of the filter."""
        later = self._coalesced_after(offset)
        is_sure = any(one in life.claimed or one in life.noted for one in later)
        assert is_sure, f"coalescing: {life.spec.ref}[{offset}] was given up for none of {later}"

    def _need_not(self, life: Life, offset: int) -> bool:
        """Whether a group need not handle a message any more."""
        return self._has_expired(offset) or self._was_superseded(life, offset)

    def _claim(self, life: Life, offset: int, about: str) -> None:
        """There is a state row, for the first time perhaps: then the filter of this step matches the message."""
        if offset not in life.claimed:
            assert offset not in life.passed, f"filter: claimed after it was passed: {about}"
            assert self._matches(life, offset), f"filter: claimed, and the filter does not match it: {about}"
            life.claimed.add(offset)

    def _check_attempt(self, life: Life, claimed: Claimed, about: str) -> None:
        assert claimed.attempt <= life.spec.max_attempts, f"8: more than its attempts: {about}"
        most = life.counted[claimed.offset]
        assert claimed.attempt <= most + 1, f"8: counted what was no attempt (at most {most} were): {about}"
        died = life.died.get(claimed.offset, 0)
        assert claimed.attempt > died, f"8: the attempt {died} on record was not counted: {about}"
        rests_until = life.rests_until.get(claimed.offset, 0)
        assert self.now >= rests_until, f"8: it did not wait after its loss: {about}, {rests_until - self.now} ms early"

    def _check_order(self, life: Life, claimed: Claimed, about: str) -> None:
        if claimed.offset in life.started:
            return
        later = [offset for offset, key in life.started.items() if key == claimed.key and offset > claimed.offset]
        assert not later, f"11: started for the first time after {later}: {about}"
        before = [offset for offset, key in life.expected.items() if key == claimed.key and offset < claimed.offset]
        # What the filter does not match may have been passed in this step; ``check`` looks at that.
        missed = [
            offset
            for offset in before
            if offset not in {*life.started, *life.given_up, *life.passed}
            and not self._need_not(life, offset)
            and (offset in life.claimed or matches(self.logged[offset], life.filter))
        ]
        assert not missed, f"11: {missed} were not started before it: {about}"

    def _check_lost(self, life: Life, claimed: Claimed, about: str) -> None:
        """A loss is nobody's decision: nothing of its partition overtakes the message until it has ended."""
        rows = DeliveryState.objects.filter(
            consumer_group=claimed.ref.group,
            topic=claimed.ref.topic,
            partition_key=claimed.key,
            message_offset__lt=claimed.offset,
            acked=False,
        ).values_list("message_offset", flat=True)
        waiting = [offset for offset in rows if offset in life.lost and not self._need_not(life, offset)]
        assert not waiting, f"11: {waiting} were lost and have not ended: {about}"

    def _check_strict_order(
        self, life: Life, claimed: Claimed, ended: set[tuple[GroupRef, int, int]], about: str
    ) -> None:
        open_rows = DeliveryState.objects.filter(
            consumer_group=claimed.ref.group,
            topic=claimed.ref.topic,
            partition_key=claimed.key,
            message_offset__lt=claimed.offset,
            acked=False,
        ).values_list("message_offset", "delivery_token")
        waiting = [
            offset
            for offset, token in open_rows
            if (claimed.ref, offset, token) not in ended and not self._need_not(life, offset)
        ]
        assert not waiting, f"11: {waiting} had not ended: {about}"

    def said(self, claimed: Claimed, kind: str) -> None:
        """The handler's word about a delivery that ``start`` let pass."""
        life = self.lives[claimed.ref]
        verdict = Verdict(claimed.token, kind, claimed.attempt, self.step)
        life.verdicts.setdefault(claimed.offset, []).append(verdict)
        life.lost.discard(claimed.offset)
        life.counted[claimed.offset] += kind in ("nack", "reject") and not claimed.suspect

    # -- the comparison -------------------------------------------------------

    def check(self) -> Tables:
        """Compares everything; what is found is raised."""
        if self.problems:
            raise self.problems[0]
        now = Tables.read()
        self.read_log(now)
        for life in self.lives.values():
            self._check_filter(life, now)
        passed = {(ref, offset) for ref, life in self.lives.items() for offset in life.passed}
        assert not invariants.at_any_moment(now, began_at=self.began_at, passed=passed)
        deletes = {self.committed[one].id for one in self.cancelled}
        deletes |= {one.id for one in self.committed.values() if self._is_replaced(one)}
        assert not invariants.between(self.before, now, deletes=deletes, passed=passed)
        self._check_outbox(now)
        self._check_refused(now)
        self._check_collected(now)
        assert now.groups.keys() == self.lives.keys()
        for _, ref, offset in effects(now)[len(self.before.effects) :]:
            assert ref in self.lives, f"9: {ref}[{offset}] took effect after the group was dropped"
        self._check_letters(now)
        for life in self.lives.values():
            self._check_rows(life, now)
            self._check_settled(life, now)
            self._check_effects(life, now)
        self.before = now
        self.log_end = max(self.logged, default=0)
        return now

    def read_log(self, now: Tables) -> None:
        """1 and the order of publishing: what was appended since the last look."""
        assert not list(invariants.log_grows(self.logged, max(self.logged, default=0), now))
        for offset, row in now.log.items():
            if offset in self.logged:
                continue
            self.logged[offset] = row
            if is_dlq(row.topic):
                continue
            number = number_of(row)
            one = self.committed.get(number)
            assert one is not None, f"1: never committed: {row}"
            assert row.identity == (self.entering.get(one.topic, one.topic), *one.identity[1:])
            assert json.loads(row.metadata).get("region") == one.metadata.get("region")
            assert number not in self.sequenced, f"sequenced twice: {row}"
            assert one.due <= self.now, f"before its time: {row}, {one}"
            self.sequenced.add(number)
            self.identities.add(one.identity)
            for life in self.lives.values():
                if life.spec.ref.topic == row.topic:
                    life.expected[offset] = row.key
        self._check_commit_order()

    def _check_commit_order(self) -> None:
        latest: dict[int, tuple[int, int]] = {}
        for row in self.logged.values():
            one = None if is_dlq(row.topic) else self.committed[number_of(row)]
            if one is None or one.due:
                continue
            # Each priority has an order of its own: a pass that cannot take all takes some of each kind.
            priority = priority_of(row.key)
            began, number = latest.get(priority, (0, 0))
            assert one.committed >= began, f"{one} was committed before {number} began and comes after it"
            if one.began > began:
                latest[priority] = one.began, one.number

    def _check_outbox(self, now: Tables) -> None:
        waiting = {
            number_of(row) for row in now.outbox if not row.failed_group and not refusing.is_refused(row.payload)
        }
        assert waiting <= self.committed.keys(), f"1: rolled back and yet there: {waiting - self.committed.keys()}"
        assert not waiting & self.sequenced, "in the log and in the outbox"
        assert not self.cancelled & (waiting | self.sequenced), "21: cancelled and yet there"
        for number in self.committed.keys() - waiting - self.sequenced - self.cancelled:
            one = self.committed[number]
            is_lost = one.identity not in self.identities and not self._is_replaced(one)
            assert not is_lost, f"1: lost between outbox and log: {one}"

    def _check_refused(self, now: Tables) -> None:
        waiting = sum(refusing.is_refused(row.payload) for row in now.outbox)
        assert waiting + len(now.quarantine) == self.refused, "lost between outbox and quarantine, or doubled"
        assert all(refusing.is_refused(row.payload) for row in now.quarantine), "set aside without a reason"

    def _is_replaced(self, one: Published) -> bool:
        """Whether a later debounced message has its coalesce key."""
        return one.debounces is not None and any(
            other.number > one.number and other.debounces == one.debounces for other in self.committed.values()
        )

    def _check_collected(self, now: Tables) -> None:
        for offset in self.before.log.keys() - now.log.keys():
            row = self.before.log[offset]
            assert self.may_collect, f"7: nobody collected, and yet it is gone: {row}"
            assert not is_dlq(row.topic), f"7: a dead letter was collected: {row}"
            is_relayed = relay_target(row.topic) is not None
            assert not is_relayed or offset <= self.arrived, f"7: it has not been relayed: {row}"
            is_read = is_relayed or any(life.spec.ref.topic == row.topic for life in self.lives.values())
            kept = RETENTION if is_read else ORPHAN_RETENTION
            assert row.published_at <= self.now - kept * 1000, f"7: too young: {row}, now {self.now}"
            for life in self.lives.values():
                if life.expected.pop(offset, None) is None:
                    continue
                # Nothing is settled by the step that collects.
                was = self._row_before(life, offset)
                done = offset in life.settled or offset in life.passed or (was is not None and was.acked)
                assert done, f"7: {life.spec.ref} has not settled it: {row}"
                life.settled.add(offset)

    def _check_filter(self, life: Life, now: Tables) -> None:
        """filter: a message is claimed only if the filter of that moment matches it, and passed only if it does not."""
        ref = life.spec.ref
        if ref not in now.groups:
            return
        for other, _, offset in now.state:
            if other == ref and offset in life.expected:
                self._claim(life, offset, f"{ref}[{offset}]")
        noted = {offset for (other, *_), offset in now.superseding.items() if other == ref and offset in self.logged}
        for offset in noted - life.noted:
            assert self._gets(life, offset), f"coalescing: {ref}[{offset}] was noted, and the group does not get it"
        life.noted = noted
        for offset, key in life.expected.items():
            if offset in life.claimed or offset in life.passed:
                continue
            if offset <= invariants.offsets_of(now, ref, key).claimed:
                is_let = self._matches(life, offset)
                assert self._need_not(life, offset) or not is_let, f"filter: {ref}[{offset}] was passed by mistake"
                if is_let and not self._has_expired(offset):
                    self._gave_up(life, offset)
                life.passed.add(offset)

    def _check_rows(self, life: Life, now: Tables) -> None:
        ref = life.spec.ref
        for other, key in self.before.offsets:
            if other == ref and (ref, key) not in now.offsets:
                # Nothing is sequenced by the step that collects.
                assert all(row.topic != ref.topic or row.key != key for row in now.log.values()), "5: not drained"
        for (other, _, offset), row in now.state.items():
            if other != ref:
                continue
            if row.delivery_token:
                life.tokens.add(row.delivery_token)
            most = life.counted[offset]
            assert row.retry_count <= most, f"8: {ref}[{offset}]: {row} of {most} failures"

    def _check_settled(self, life: Life, now: Tables) -> None:
        ref = life.spec.ref
        for offset in life.expected:
            if offset not in life.settled and invariants.is_settled(now, ref, self.logged[offset]):
                life.settled.add(offset)
                assert self._may_settle(life, offset), f"1: {ref}[{offset}] was settled, but nobody had handled it"
            assert offset in life.letters or offset not in life.given_up, f"6: {ref}[{offset}] has no dead letter"

    def _may_settle(self, life: Life, offset: int) -> bool:
        """Its present holder has acked it, it is in the DLQ, it was passed, or it has expired or is superseded."""
        if offset in life.passed or offset in life.letters or self._has_expired(offset):
            return True
        if self._was_superseded(life, offset) and not any(one.kind == "ack" for one in life.verdicts.get(offset, ())):
            self._gave_up(life, offset)
            life.passed.add(offset)
            return True
        return any(one.kind == "ack" for one in self._of_the_holder(life, offset))

    def _row_before(self, life: Life, offset: int) -> State | None:
        return self.before.state.get((life.spec.ref, self.logged[offset].key, offset))

    def _of_the_holder(self, life: Life, offset: int) -> list[Verdict]:
        """What was said with the token that the row last had: the word of a stale holder does not count."""
        row = self._row_before(life, offset)
        said = life.verdicts.get(offset, [])
        return [one for one in said if one.step == self.step or (row is not None and one.token == row.delivery_token)]

    def _check_letters(self, now: Tables) -> None:
        for letter in invariants.dead_letters(now):
            if letter.id in self.letters:
                continue
            self.letters.add(letter.id)
            offset, about = letter.original_offset, f"6: {letter}"
            life = self.lives.get(GroupRef(letter.failed_group, letter.original_topic))
            assert life is not None, about
            assert letter.payload == self.logged[offset].payload, about
            life.letters[offset] = letter.id
            row = self._row_before(life, offset)
            used_up = row is not None and row.delivered_by != "" and row.retry_count >= life.spec.max_attempts
            said = self._of_the_holder(life, offset)
            failed = any(
                one.kind == "reject" or (one.kind == "nack" and one.attempt >= life.spec.max_attempts) for one in said
            )
            given_up = offset in life.given_up
            assert used_up or failed or given_up, f"{about}: it had not used up its attempts: {row}, {said}"

    def _check_effects(self, life: Life, now: Tables) -> None:
        if not life.spec.atomic:
            return
        found = Counter(
            offset for number, ref, offset in effects(now) if ref == life.spec.ref and number > life.effects_before
        )
        for offset in found:
            assert found[offset] == 1, f"9: {life.spec.ref}[{offset}] took effect {found[offset]} times"
            assert offset in life.settled, f"9: {life.spec.ref}[{offset}] took effect and is not settled"
            assert offset not in life.passed, f"filter: {life.spec.ref}[{offset}] took effect and was passed"
        for offset in life.settled - life.letters.keys() - life.passed:
            assert offset in found or self._has_expired(offset), (
                f"9: {life.spec.ref}[{offset}] is acked and has had no effect"
            )
