"""Each invariant can fail: a sound queue, and one rule broken at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from django_mysqlqueue.models import DeliveryEvent
from tests.support import invariants
from tests.support.internals import GroupRef
from tests.support.tables import (
    Event,
    Group,
    Heartbeat,
    Logged,
    Offsets,
    Operation,
    SetAside,
    State,
    Tables,
    Waiting,
)

pytestmark = pytest.mark.any_engine

G, H, GONE = GroupRef("g", "t"), GroupRef("h", "t"), GroupRef("gone", "t")
DLQ = "t_dlq"
Outcome = DeliveryEvent.Outcome


def message(offset, key="a", **columns):
    return Logged(offset, "t", key, f"{key}{offset}", b"1", **columns)


def letter(row, group="g", at=200):
    """A dead letter of the message at an offset; ``row`` is its own place."""
    return Logged(
        row, DLQ, "a", f"l{row}", b"1", original_topic="t", original_offset=2, failed_group=group, failed_at=at
    )


def logged(*rows):
    return {row.offset: row for row in rows}


SOUND = Tables(
    log=logged(*(message(n) for n in range(1, 5)), message(5, "b"), message(6, target_group="h")),
    outbox=[Waiting(1, "t", "a", "a9", b"1", deliver_at=900)],
    groups={G: Group(id=1, registered_at=100), H: Group("shared", id=2, registered_at=100)},
    offsets={(G, "a"): Offsets(1, 3), (H, "a"): Offsets(0, 6)},
    state={
        (G, "a", 2): State(delivered_by="me", delivery_token=7),
        (G, "a", 3): State(acked=True),
        **{(H, "a", n): State() for n in (1, 2, 3, 4, 6)},
    },
    leases={(G, "a"): "me", (G, "b"): ""},
    heartbeats={(G, "me"): Heartbeat(500), (H, "other"): Heartbeat(500)},
    sequencer=6,
    now=500,
)
"""Of the group g 1 and 3 are settled, 2 is in flight, 4 and 5 are not claimed; 6 is for the group h alone."""


ASIDE = SetAside(1, "t", "a", "q1", b"1", created_at=400)


def without(rows, *keys):
    return {key: row for key, row in rows.items() if key not in keys}


def with_group(ref=G, tables=SOUND, **columns):
    return {**tables.groups, ref: tables.groups[ref]._replace(**columns)}


def test_a_sound_queue():
    assert invariants.at_any_moment(SOUND) == []
    assert invariants.between(SOUND, SOUND, untouched=[G, H]) == []
    assert invariants.settled(SOUND) == {(G, 1), (G, 3)}


def test_what_was_settled_and_collected_is_remembered():
    later = replace(SOUND, log=without(SOUND.log, 1))
    assert invariants.settled(later) == {(G, 3)}
    assert invariants.settled(later, invariants.settled(SOUND)) == {(G, 1), (G, 3)}
    dropped = replace(later, groups=without(SOUND.groups, G))
    assert invariants.settled(dropped, invariants.settled(SOUND)) == set()


def test_a_group_without_offsets_rows_has_settled_what_is_before_its_start():
    tables = replace(SOUND, groups={G: Group(start_offset=3)}, offsets={}, state={}, leases={})
    assert invariants.settled(tables) == {(G, 1), (G, 2), (G, 3)}


BROKEN = {
    "watermark above cursor": ({"offsets": {**SOUND.offsets, (G, "b"): Offsets(5, 4)}}, "is above the cursor 4"),
    "watermark below start": ({"groups": with_group(start_offset=2)}, "below its start offset 2"),
    "cursor above the log": ({"offsets": {**SOUND.offsets, (G, "b"): Offsets(7, 7)}}, "above the end of the log, 6"),
    "unsettled below watermark": (
        {"state": {**SOUND.state, (G, "a", 1): State()}},
        "the watermark 1 of g/t has passed g/t[1], which is not settled",
    ),
    "settled below watermark": (
        {"state": {**SOUND.state, (G, "a", 1): State(acked=True)}},
        "the watermark 1 of g/t has passed g/t[1], which is settled and has a row still",
    ),
    "state above cursor": (
        {"state": {**SOUND.state, (G, "a", 4): State()}},
        "g/t[4] has a state row above the cursor 3",
    ),
    "suspect without a token": (
        {"state": {**SOUND.state, (G, "a", 3): State(acked=True, suspect=True)}},
        "g/t[3] is suspect without a token",
    ),
    "state without offsets": ({"state": {**SOUND.state, (G, "b", 5): State()}}, "and its partition 'b' no offsets row"),
    "state in another partition": (
        {"state": {**SOUND.state, (G, "b", 4): State()}, "offsets": {**SOUND.offsets, (G, "b"): Offsets(0, 4)}},
        "g/t[4] has a state row in 'b', where it does not belong",
    ),
    "state for another group": (
        {
            "state": {**SOUND.state, (G, "a", 4): State(), (G, "a", 6): State()},
            "offsets": {**SOUND.offsets, (G, "a"): Offsets(1, 6)},
        },
        "g/t[6] has a state row in 'a', where it does not belong",
    ),
    "lost": ({"state": without(SOUND.state, (G, "a", 2))}, "LOST: g/t[2] is between watermark 1 and cursor 3"),
    "lost while paused": (
        {"state": without(SOUND.state, (G, "a", 2)), "groups": with_group(paused=True)},
        "LOST: g/t[2]",
    ),
    "lost of another life's drop": (
        {
            "state": without(SOUND.state, (G, "a", 2)),
            "groups": with_group(paused=True),
            "operations": [Operation(1, "drop", G, started_at=99)],
        },
        "LOST: g/t[2]",
    ),
    "lost for its only group": ({"state": without(SOUND.state, (H, "a", 6))}, "LOST: h/t[6]"),
    "offsets of nobody": (
        {"offsets": {**SOUND.offsets, (GONE, "a"): Offsets(0, 0)}},
        "there are offsets rows of gone/t",
    ),
    "leases of nobody": ({"leases": {**SOUND.leases, (GONE, "a"): "me"}}, "there are leases rows of gone/t"),
    "state of nobody": ({"state": {**SOUND.state, (GONE, "a", 1): State()}}, "there are state rows of gone/t"),
    "seek and not paused": (
        {"groups": with_group(after_seek="resume", operation=1)},
        "g/t is not paused during a seek",
    ),
    "seek without its operation": (
        {"groups": with_group(paused=True, after_seek="resume")},
        "g/t has the operation 0 under way, and after_seek is 'resume'",
    ),
    "operation without a seek": (
        {"groups": with_group(operation=1)},
        "g/t has the operation 1 under way, and after_seek is ''",
    ),
    "seek whose operation has ended": (
        {
            "groups": with_group(paused=True, after_seek="resume", operation=1),
            "operations": [Operation(1, "seek", G, started_at=99, ended_at=100)],
        },
        "g/t says that the operation 1 is under way, which has ended",
    ),
    "lease in a shared group": ({"leases": {(H, "a"): "me"}}, "me holds the lease of 'a' in h/t, which is shared"),
    "an id twice": (
        {"log": {**SOUND.log, 4: SOUND.log[1]._replace(offset=4)}},
        "('t', 'a', 'a1') is in the log at 1 and at 4",
    ),
    "log behind the sequencer": ({"sequencer": 5}, "the log ends at 6 and the sequencer says 5"),
    "set aside and in the outbox": (
        {"quarantine": [ASIDE], "outbox": [Waiting(2, "t", "a", "q1", b"1", created_at=400)]},
        "('t', 'a', 'q1') is in the quarantine and in 1 other places",
    ),
    "set aside and in the log": (
        {"quarantine": [ASIDE], "log": {**SOUND.log, 4: SOUND.log[4]._replace(id="q1", created_at=400)}},
        "('t', 'a', 'q1') is in the quarantine and in 1 other places",
    ),
    "dead and live": ({"log": {**SOUND.log, 7: letter(7)}, "sequencer": 7}, "g/t[2] is in the DLQ and still live"),
    "on its way to the DLQ and live": (
        {
            "outbox": [
                Waiting(2, DLQ, "a", "l", b"1", original_topic="t", original_offset=2, failed_group="g", failed_at=200)
            ]
        },
        "g/t[2] is in the DLQ and still live",
    ),
    "dead twice": (
        {
            "log": {**SOUND.log, 7: letter(7), 8: letter(8)},
            "sequencer": 8,
            "state": {**SOUND.state, (G, "a", 2): State(acked=True)},
        },
        "g/t[2] is in the DLQ 2 times",
    ),
    "dead and redriven": (
        {
            "log": {**SOUND.log, 7: letter(7)},
            "outbox": [Waiting(2, "t", "a", "r", b"1", target_group="g", original_topic="t", original_offset=2)],
            "sequencer": 7,
            "state": {**SOUND.state, (G, "a", 2): State(acked=True)},
        },
        "g/t[2] is in the DLQ and still live",
    ),
    "dead and redriven in a drop": (
        {
            "log": {**SOUND.log, 7: letter(7)},
            "outbox": [Waiting(2, "t", "a", "r", b"1", target_group="g", original_topic="t", original_offset=2)],
            "sequencer": 7,
            "groups": with_group(paused=True, after_seek="dropped", operation=1),
            "leases": {},
        },
        "g/t[2] is in the DLQ and still live",
    ),
    "dead before a seek and since": (
        {
            "log": {**SOUND.log, 7: letter(7), 8: letter(8, at=400)},
            "sequencer": 8,
            "groups": with_group(sought_at=300),
        },
        "g/t[2] is in the DLQ and still live",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_holds_at_any_moment(name):
    change, text = BROKEN[name]
    found = invariants.at_any_moment(replace(SOUND, **change))
    assert len(found) == 1, found
    assert text in found[0]


SEEKING = with_group(paused=True, after_seek="resume", operation=1, start_offset=4)
ALLOWED = {
    "a seek forward has stored the offsets": {
        "groups": SEEKING,
        "offsets": {**SOUND.offsets, (G, "a"): Offsets(4, 4)},
    },
    "a seek forward has only begun": {"groups": SEEKING},
    "a seek back has stored the offsets": {
        "groups": with_group(paused=True, after_seek="resume", operation=1),
        "offsets": {**SOUND.offsets, (G, "a"): Offsets(0, 0)},
    },
    "a drop has deleted the state rows": {
        "groups": with_group(paused=True, after_seek="dropped", operation=1),
        "state": without(SOUND.state, (G, "a", 2), (G, "a", 3)),
        "leases": {},
    },
    "a drop has deleted the rows that tell that a dead letter is settled": {
        "log": {**SOUND.log, 7: letter(7)},
        "sequencer": 7,
        "groups": with_group(paused=True, after_seek="dropped", operation=1),
        "offsets": without(SOUND.offsets, (G, "a")),
        "state": without(SOUND.state, (G, "a", 2), (G, "a", 3)),
        "leases": {},
    },
    "a dead letter of a delivery that a seek has not revoked yet": {
        "log": {**SOUND.log, 7: letter(7)},
        "sequencer": 7,
        "groups": SEEKING,
    },
    "a dead letter from before a seek": {
        "log": {**SOUND.log, 7: letter(7)},
        "sequencer": 7,
        "groups": with_group(sought_at=200),
    },
    "a dead letter from an earlier life": {
        "log": {**SOUND.log, 7: letter(7)},
        "sequencer": 7,
        "groups": with_group(registered_at=200),
    },
    "a dead letter of a group that is gone": {"log": {**SOUND.log, 7: letter(7, "gone")}, "sequencer": 7},
    "a message for another group is passed over": {
        "offsets": {**SOUND.offsets, (G, "a"): Offsets(1, 6)},
        "state": {**SOUND.state, (G, "a", 4): State()},
    },
    "a message that the filter does not match is passed over": {
        "groups": with_group(filter='{"region": ["eu"]}'),
        "offsets": {**SOUND.offsets, (G, "a"): Offsets(1, 4)},
    },
    "or that an overridden filter does not match": {
        "groups": with_group(overrides='{"filter": {"value": {"region": ["eu"]}, "at": 1, "by": "ops"}}'),
        "offsets": {**SOUND.offsets, (G, "a"): Offsets(1, 4)},
    },
    "the sequencer's row is lost": {"sequencer": None},
    "the log is collected": {"log": {}, "collected": {"t": 6}},
    "a duplicate of what is set aside": {
        "quarantine": [ASIDE],
        "outbox": [Waiting(2, "t", "a", "q1", b"1", created_at=401)],
    },
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_may_be_at_any_moment(name):
    assert invariants.at_any_moment(replace(SOUND, **ALLOWED[name])) == []


def test_a_dead_letter_from_before_by_the_tests_own_clock():
    tables = replace(SOUND, log={**SOUND.log, 7: letter(7)}, sequencer=7)
    assert invariants.at_any_moment(tables, began_at={G: 199})
    assert not invariants.at_any_moment(tables, began_at={G: 200})


# -- between two moments ------------------------------------------------------

PASSED = {(G, "a"): Offsets(3, 3), (H, "a"): Offsets(6, 6)}
COLLECTED = replace(
    SOUND,
    log=without(SOUND.log, 1, 2, 3),
    offsets=PASSED,
    state={},
    collected={"t": 3},
)
"""GC has taken what both groups have settled meanwhile."""
LETTER = replace(SOUND, log={**SOUND.log, 7: letter(7, "gone")}, sequencer=7)
QUARANTINED = replace(SOUND, quarantine=[ASIDE])
EVENT, DONE = Event(1, G, "a", 3, Outcome.ACKED), Operation(1, "seek", H, changed=3, started_at=1, ended_at=2)
RECORDED = replace(SOUND, events=[EVENT], operations=[DONE], collected={"t": 0, "u": 5})

H_ROWS = [place for place in SOUND.state if place[0] == H]

STEPS = {
    "a drop": (SOUND, {"groups": without(SOUND.groups, G)}, "g/t was dropped"),
    "a drop and a registration": (SOUND, {"groups": with_group(id=3)}, "g/t was dropped"),
    "another start": (SOUND, {"groups": with_group(start_offset=1)}, "the start offset of g/t was 0 and is 1"),
    "another revision": (
        replace(SOUND, groups=with_group(revision=2)),
        {"groups": with_group(revision=1)},
        "the revision of g/t fell from 2 to 1",
    ),
    "an ack is gone": (
        SOUND,
        {"state": {**SOUND.state, (G, "a", 3): State()}},
        "g/t[3] was settled and is not any more",
    ),
    "a watermark back": (
        replace(SOUND, log=without(SOUND.log, 1), offsets={**SOUND.offsets, (H, "a"): Offsets(1, 6)}),
        {"offsets": {**SOUND.offsets, (H, "a"): Offsets(0, 6)}},
        "the watermark of h/t in 'a' went back from 1 to 0",
    ),
    "a cursor back": (
        SOUND,
        {"offsets": {**SOUND.offsets, (H, "a"): Offsets(0, 5)}},
        "the cursor of h/t in 'a' went back from 6 to 5",
    ),
    "an offsets row gone": (
        SOUND,
        {"offsets": without(SOUND.offsets, (H, "a"))},
        "the offsets row of h/t in 'a' is gone, and the log holds messages that it had passed",
    ),
    "another payload": (
        SOUND,
        {"log": {**SOUND.log, 4: SOUND.log[4]._replace(payload=b"2")}},
        "the message at 4 has changed",
    ),
    "below the end": (
        replace(SOUND, sequencer=8),
        {"log": {**SOUND.log, 8: message(8)}},
        "('t', 'a', 'a8') appeared at 8",
    ),
    "gone without GC": (
        replace(COLLECTED, offsets={**PASSED, (G, "b"): Offsets(5, 5), (H, "b"): Offsets(5, 5)}),
        {"log": without(COLLECTED.log, 5)},
        "is gone, and GC has not been so far",
    ),
    "collected above the watermark": (
        SOUND,
        {
            **{name: getattr(COLLECTED, name) for name in ("log", "collected")},
            "offsets": {**PASSED, (G, "a"): Offsets(2, 3)},
        },
        "g/t[3] was deleted from the log before the group had passed it",
    ),
    "collected ahead of the watermark": (
        replace(SOUND, offsets={**SOUND.offsets, (H, "a"): Offsets(6, 6)}, state=without(SOUND.state, *H_ROWS)),
        {"log": without(SOUND.log, 3), "collected": {"t": 3}},
        "g/t[3] was deleted from the log before the group had passed it",
    ),
    "collected and forgotten": (
        replace(SOUND, log=without(SOUND.log, 4)),
        {"log": logged(SOUND.log[5]), "collected": {"t": 6}, "offsets": {(H, "a"): Offsets(6, 6)}},
        "g/t[2] was deleted from the log before the group had passed it",
    ),
    "a dead letter without a trace": (
        LETTER,
        {"log": SOUND.log, "collected": {DLQ: 7}},
        "the dead letter l7 at 7 is gone, and no operator has taken it",
    ),
    "lost in the outbox": (SOUND, {"outbox": []}, "('t', 'a', 'a9') was lost between outbox and log"),
    "changed in the outbox": (
        SOUND,
        {"outbox": [SOUND.outbox[0]._replace(key="b")]},
        "the message 1 of the outbox has changed",
    ),
    "changed in the quarantine": (
        QUARANTINED,
        {"quarantine": [ASIDE._replace(payload=b"2")]},
        "the message 1 of the quarantine has changed",
    ),
    "lost in the quarantine": (
        QUARANTINED,
        {"quarantine": []},
        "1 messages of the quarantine are gone, and operators have deleted 0",
    ),
    "requeued twice": (
        QUARANTINED,
        {"quarantine": [], "outbox": [*SOUND.outbox, *(Waiting(n, *ASIDE[1:5], created_at=400) for n in (2, 3))]},
        "('t', 'a', 'q1') has left the quarantine for 2 places",
    ),
    "another event": (RECORDED, {"events": [EVENT._replace(outcome="failed")]}, "has changed"),
    "an operation counts down": (RECORDED, {"operations": [DONE._replace(changed=2)]}, "went back"),
    "an operation goes on": (RECORDED, {"operations": [DONE._replace(ended_at=0)]}, "went back"),
    "the sequencer back": (replace(SOUND, sequencer=8), {"sequencer": 7}, "the sequencer went back from 8 to 7"),
    "GC back": (RECORDED, {"collected": {"u": 4, "t": 0}}, "how far 'u' was collected went back from 5"),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_holds_between_two_moments(name):
    earlier, change, text = STEPS[name]
    assert invariants.between(earlier, earlier) == []
    found = invariants.between(earlier, replace(earlier, **change))
    assert len(found) == 1, found
    assert text in found[0]


@pytest.mark.parametrize(
    ("table", "place", "row"),
    [
        ("groups", H, Group("shared", id=2, registered_at=100, paused=True)),
        ("offsets", (H, "a"), Offsets(0, 7)),
        ("state", (H, "a", 1), State(retry_count=1)),
        ("leases", (H, "a"), ""),
        ("heartbeats", (H, "other"), Heartbeat(501)),
    ],
)
def test_a_bystanders_row_changes(table, place, row):
    later = replace(SOUND, **{table: {**getattr(SOUND, table), place: row}})
    assert invariants.between(SOUND, later, untouched=[G]) == []
    (found,) = invariants.between(SOUND, later, untouched=[H])
    assert f"of {table} was" in found


def test_a_debounced_message_is_replaced():
    """By a later one with its key that waits, or has entered the log since; by nothing else."""
    early, late = (
        SOUND.outbox[0]._replace(outbox_id=number, id=f"d{number}", coalesce_key="c", is_debounced=True)
        for number in (2, 3)
    )
    before = replace(SOUND, outbox=[early, late])
    entered = {**SOUND.log, 7: message(7)._replace(id="d3", coalesce_key="c")}
    for now in (replace(SOUND, outbox=[late]), replace(SOUND, outbox=[], log=entered, sequencer=7)):
        assert invariants.between(before, now) == []
    lost = ["('t', 'a', 'd2') was lost between outbox and log"]
    assert invariants.between(replace(SOUND, outbox=[early]), replace(SOUND, outbox=[])) == lost
    other = late._replace(coalesce_key=None)
    assert invariants.between(replace(before, outbox=[early, other]), replace(SOUND, outbox=[other])) == lost
    plain = early._replace(is_debounced=False)
    assert invariants.between(replace(before, outbox=[plain, late]), replace(SOUND, outbox=[late])) == lost


def test_what_may_be_done_between_two_moments():
    def sound(earlier, later, **options):
        assert invariants.between(earlier, later, **options) == []

    sound(SOUND, COLLECTED)
    # A message is sequenced, moved, cancelled, or dropped as the repeat of one in the log.
    arrived = replace(SOUND, outbox=[], log={**SOUND.log, 7: message(7)._replace(id="a9")}, sequencer=7)
    sound(SOUND, arrived)
    sound(SOUND, replace(SOUND, outbox=[SOUND.outbox[0]._replace(deliver_at=5)]))
    sound(SOUND, replace(SOUND, outbox=[]), deletes={"a9"})
    sound(replace(arrived, outbox=SOUND.outbox), arrived)
    # It was handled and collected as well.
    sound(SOUND, replace(SOUND, outbox=[], sequencer=7, collected={"t": 7}))
    # A test's flush has deleted the sequencer's row; the next pass makes it anew.
    sound(SOUND, replace(SOUND, sequencer=None))
    sound(replace(SOUND, sequencer=None), SOUND)
    # Operators have dropped or sought a group, or taken a dead letter.
    sound(SOUND, replace(SOUND, groups=without(SOUND.groups, G)), forgets=[G])
    sound(SOUND, replace(SOUND, offsets={**SOUND.offsets, (G, "a"): Offsets(0, 0)}, state={}), forgets=[G, H])
    taken = Event(1, GroupRef("gone", DLQ), "a", 7, Outcome.DISCARDED)
    sound(LETTER, replace(SOUND, sequencer=7, events=[taken]))
    letter_waits = Waiting(1, DLQ, "a", "l7", b"1", failed_group="gone")
    sound(replace(SOUND, outbox=[letter_waits]), replace(SOUND, outbox=[], sequencer=7, events=[taken]))
    # The log has refused it; an operator has requeued it, or deleted it.
    sound(SOUND, replace(SOUND, outbox=[], quarantine=[SetAside(1, *SOUND.outbox[0][1:5])]))
    sound(QUARANTINED, replace(SOUND, outbox=[*SOUND.outbox, Waiting(2, *ASIDE[1:5], created_at=400)]))
    sound(QUARANTINED, replace(SOUND, operations=[Operation(1, "delete quarantined", H, changed=1, started_at=1)]))
    sound(QUARANTINED, replace(SOUND, sequencer=7, collected={"t": 7}))
    # GC has forgotten the partition as well, and what was settled before that is on record.
    forgotten = replace(SOUND, log=logged(SOUND.log[5]), offsets={}, state={}, collected={"t": 6})
    acks = [(G, 2), (G, 4), *((H, n) for n in (1, 2, 3, 4, 6))]
    recorded = [Event(n, ref, "a", offset, Outcome.ACKED) for n, (ref, offset) in enumerate(acks)]
    sound(SOUND, replace(forgotten, events=recorded))
    anew = {(ref, "a"): Offsets(0, 0) for ref in (G, H)}
    sound(SOUND, replace(forgotten, events=recorded, offsets=anew))
    sound(SOUND, forgotten, recorded=False)
    assert len(invariants.between(SOUND, forgotten)) == len(acks)


# -- when everything has been handled -----------------------------------------

DRAINED = replace(SOUND, offsets={(ref, key): Offsets(6, 6) for ref in (G, H) for key in "ab"}, state={}, leases={})
LEFT = {
    "a message is due": ({"now": 900}, "('t', 'a', 'a9') is due and still in the outbox"),
    "a state row": ({"state": {(G, "a", 7): State(acked=True)}}, "g/t[7] in 'a' has a state row"),
    "a state row of nobody": ({"state": {(GONE, "a", 7): State()}}, "gone/t[7] in 'a' has a state row"),
    "a lease": ({"leases": {(G, "a"): ""}}, "the lease of 'a' in g/t is still there"),
    "a lease of nobody": ({"leases": {(GONE, "a"): ""}}, "the lease of 'a' in gone/t is still there"),
    "a watermark": ({"offsets": {**DRAINED.offsets, (G, "a"): Offsets(6, 7)}}, "is 6, the cursor 7"),
    "a partition": ({"offsets": without(DRAINED.offsets, (H, "b"))}, "h/t[5] in 'b' is not settled"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_holds_of_a_drained_queue(name):
    change, text = LEFT[name]
    (found,) = invariants.drained(replace(DRAINED, **change))
    assert text in found


def test_a_drained_queue():
    assert invariants.drained(DRAINED) == []
    # Nobody works for a group that is paused, and nobody has worked for one that is idle.
    paused = replace(SOUND, groups=with_group(paused=True, tables=replace(SOUND, groups=with_group(H, paused=True))))
    assert invariants.drained(paused) == []
    assert invariants.drained(replace(DRAINED, offsets={}), idle=[G, H]) == []
