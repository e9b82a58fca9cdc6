"""The rules about another database, and what the model expects there.

The topic ``r`` is published via the database of the test and relayed to the other one. A route may keep its messages
here; then a group that moves to the other database handles them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from django_mysqlqueue.models import ConsumerGroup, RelayPosition, RelayWatermark
from django_mysqlqueue.names.rules import relayed_topic
from django_mysqlqueue.operations import moving
from tests.support import invariants
from tests.support.harness import USING
from tests.support.internals import GroupRef, relaying, sequencing
from tests.support.tables import Logged, Tables, Waiting

if TYPE_CHECKING:
    from tests.model.machine import Process
    from tests.model.queue_model import Model

OTHER = "queue"
TOPIC = "r"
RELAYED = relayed_topic(TOPIC, OTHER)
"""The topic of its messages in the outbox, and in the log unless a route keeps them here."""
SETTINGS = {TOPIC: {"DATABASE": OTHER, "VIA": USING}}
MOVES = GroupRef("moves", TOPIC)
Content = tuple[str, str, bytes]
"""Key, id and payload of a message."""


class Killed(Exception):
    """The process ends here."""


def first_of_each(rows: Iterable[Logged | Waiting]) -> dict[str, list[Content]]:
    """By key, what remains of messages in this order when duplicates are dropped."""
    found: dict[str, dict[str, Content]] = {}
    for row in rows:
        found.setdefault(row.key, {}).setdefault(row.id, (row.key, row.id, row.payload))
    return {key: list(contents.values()) for key, contents in found.items()}


def position() -> int:
    """The offset up to which the other database says that it has received the log."""
    return RelayPosition.objects.using(OTHER).values_list("relayed_offset", flat=True).first() or 0


def for_other(model: Model) -> dict[int, Logged]:
    """What has entered the log for the other database, by offset."""
    return {offset: row for offset, row in sorted(model.logged.items()) if row.topic == RELAYED}


def check_what_has_arrived(model: Model) -> None:
    """Exactly the log up to the position is there: each message once, in order within its key.

    The source never knows of more than has arrived.
    """
    place, for_it = position(), for_other(model)
    known = RelayWatermark.objects.using(USING).filter(target=OTHER).first()
    if known is not None:
        assert known.relayed_offset <= place, f"relay: the source knows of {known.relayed_offset}, but {place} arrived"
        missed = [offset for offset in for_it if place < offset <= known.read_offset]
        assert not missed, f"relay: {missed} have not arrived, and GC may delete them"
    there = Tables.read(OTHER)
    assert not invariants.at_any_moment(there)
    waiting = sorted(there.outbox, key=lambda one: (one.deliver_at, one.outbox_id))
    arrived = first_of_each([*(row for _, row in sorted(there.log.items())), *waiting])
    expected = first_of_each(row for offset, row in for_it.items() if offset <= place)
    assert arrived == expected, f"relay: up to {place}"
    assert {row.topic for row in (*there.log.values(), *there.outbox)} <= {TOPIC}
    model.arrived = place


class OtherDatabase(RuleBasedStateMachine):
    """The rules."""

    model: Model
    processes: list[Process]

    def begin(self) -> None:
        raise NotImplementedError

    @rule(
        what=st.sampled_from(["relay"] * 4 + ["relay, killed", "sequence", "leave", "leave", "stay", "hand over"]),
        rows=st.integers(1, 3),
    )
    def in_the_other_database(self, what: str, rows: int) -> None:
        """One rule, so that it is not drawn more often than the others."""
        self.begin()
        if what.startswith("relay"):
            self.relay(rows, killed=what == "relay, killed")
        elif what == "sequence":
            sequencing.sequence(OTHER, max_rows=rows)
        elif what in ("leave", "stay"):
            self.divide(leave=what == "leave")
        else:
            self.hand_over()
        check_what_has_arrived(self.model)

    def relay(self, rows: int, *, killed: bool = False) -> relaying.Relayed:
        """It may be killed between its two transactions."""
        before = position()
        note: Any = patch.object(relaying, "_note", side_effect=Killed) if killed else contextlib.nullcontext()
        with note, contextlib.suppress(Killed):
            done = relaying.relay(USING, OTHER, max_rows=rows)
            assert not done.busy
            assert not done.repeats
            new = [offset for offset in for_other(self.model) if before < offset <= position()]
            assert done.messages == len(new), f"relay: {done}, but {new} are new"
            return done
        return relaying.Relayed(more=True)

    def divide(self, *, leave: bool) -> None:
        """From now on messages of the topic leave for the other database, or stay."""
        source, target = (USING, OTHER) if leave else (OTHER, USING)
        move = moving.Move(TOPIC, USING, source, target, "operator")
        if leave:
            moving.register(move)
        end = moving.cut(move)
        assert end == max(self.model.logged, default=0), "move: another offset divides them"
        self.model.entering[TOPIC] = RELAYED if leave else TOPIC
        self.model.moves = leave

    def hand_over(self) -> None:
        """The group works on in the other database, if it has settled everything here."""
        life = self.model.lives.get(MOVES)
        if life is None or not self.model.moves or not moving.is_drained(USING, MOVES):
            return
        left = life.expected.keys() - life.settled - life.passed
        assert not left, f"move: {left} are not settled, and the group leaves them"
        here, there = (
            ConsumerGroup.objects.using(alias).filter(consumer_group=MOVES.group, topic=TOPIC).first()
            for alias in (USING, OTHER)
        )
        assert here is not None
        if there is None:
            return  # It was registered here after the cut: the operation refuses.
        moving.hand_over(moving.Move(TOPIC, USING, USING, OTHER, "operator"), MOVES)
        was_paused = there.paused
        there.refresh_from_db()
        assert there.paused == (was_paused and here.paused)
        self.model.dropped(MOVES)
        for process in self.processes:
            process.outdated.add(MOVES)

    def drain_the_other(self) -> None:
        """Everything that is for it arrives."""
        while (done := self.relay(100)).messages or done.more:
            pass
        while sequencing.sequence(OTHER).more:
            pass
        check_what_has_arrived(self.model)
        last = max(for_other(self.model), default=0)
        assert self.model.arrived >= last, f"relay: {last} has not arrived"
