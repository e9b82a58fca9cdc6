"""Which operations run at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations_with_replacement

from tests.interleavings import sql_clients as _declared  # noqa: F401
from tests.interleavings.operations import OPERATIONS, UNDO_OTHERS, both, of
from tests.interleavings.trials import Pair

PUBLISHERS = ("publish", "publish a duplicate", "publish_many in chunks", "cancel in a transaction", "reschedule")
HOUSEKEEPING = (
    "sequence",
    "collect",
    "collect history",
    "add to rollups",
    "sample the backlog",
    "forget old heartbeats",
)
GROUPS = (
    "register again",
    "register another group from the beginning",
    "register another group from the end",
    "set_mode shared",
    "pause",
    "resume",
    "drop",
    "seek to the beginning",
    "seek to the end",
)
SUBSCRIBER = (
    "beat",
    "deregister",
    "forget a heartbeat",
    "verify leases",
    "release leases",
    "drop drained leases",
    "release everything",
    "claim",
    "claim and flush",
    "claim again",
    "undo",
    "flush acks",
    "flush failures",
    "flush an ack behind a failure",
    "sweep",
    "create offsets rows",
    "ack in a transaction",
    "settle in a transaction",
    "record a start",
)
NEWCOMERS = ("take over", "join", "beat of a newcomer")
SINGLE = "enqueue a job that is unique until it has ended"
OPERATORS = (
    "remove a lost subscriber",
    "remove the subscriber",
    "revoke leases",
    "retry",
    "dead-letter now",
    "redrive",
    "discard",
    "replace",
    "cancel scheduled",
    "deliver scheduled now",
    "move scheduled",
    "bring everything nearer",
)
WHOLE = ("a turn, ordered",)
SHARED = (
    "claim, shared",
    "claim and flush, shared",
    "undo",
    "flush acks",
    "flush failures",
    "flush an ack behind a failure",
    "extend",
    "extend all",
    "ack in a transaction",
    "settle in a transaction",
    "record a start",
    "release everything",
    "sweep",
    "drop",
    "seek to the beginning",
    "seek to the end",
    "pause",
    "retry",
    "dead-letter now",
    "set_mode ordered",
    "a turn, shared",
)
STALE = (
    "claim",
    "claim and flush",
    "claim again",
    "undo",
    "flush acks",
    "flush failures",
    "ack in a transaction",
    "settle in a transaction",
    "record a start",
    "verify leases",
    "release leases",
    "drop drained leases",
    "beat",
)
"""What a process does that was frozen, and does not know that it counts as gone."""
MEANWHILE = (
    "take over",
    "join",
    "set_mode shared",
    "remove the subscriber",
    "release everything",
    "drop",
    "seek to the beginning",
    "a turn, ordered",
)
"""What others do meanwhile."""


def all_of(world: str, names: Sequence[str]) -> Iterable[Pair]:
    for pair in combinations_with_replacement(names, 2):
        yield Pair(world, tuple(of(pair)))


def each(world: str, ones: Sequence[str], others: Sequence[str]) -> Iterable[Pair]:
    seen = set()
    for one in ones:
        for other in others:
            if (other, one) not in seen:
                seen.add((one, other))
                yield Pair(world, tuple(of((one, other))))


CALLS = ("claim in SQL", "ack in SQL", "ack in SQL in a transaction", "nack in SQL", "reject in SQL", "extend in SQL")


def sql_clients() -> Iterable[Pair]:
    """Calls of procedures, between the statements of everybody else."""
    for_all = (
        "flush acks",
        "flush failures",
        "drop",
        "seek to the beginning",
        "seek to the end",
        "pause",
        "retry",
        "dead-letter now",
        "collect",
        "sequence",
        "sweep",
        "release everything",
        "ack in a transaction",
        "record a start",
    )
    ordered = ("claim", "claim and flush", "claim again", "take over", "join", "revoke leases", "release leases")
    ordered_too = ("drop drained leases", "set_mode shared", "beat", "a turn, ordered")
    shared = ("claim, shared", "claim and flush, shared", "extend all", "set_mode ordered", "a turn, shared")
    for world, others in (("busy", (*for_all, *ordered, *ordered_too)), ("shared", (*for_all, *shared))):
        yield from all_of(world, CALLS)
        yield from each(world, CALLS, others)
    yield from each("forsaken", CALLS[:2], ("claim", "claim again", "take over", "join", "release everything"))
    yield from each("used_up", CALLS[:1], ("take over", "claim again", "flush acks"))
    yield from each("busy", ("pass rows",), ("claim and flush", "flush acks", "claim in SQL", "seek to the beginning"))


def expiry() -> Iterable[Pair]:
    """Claims that pass what has expired."""
    passes = "claim that passes what has expired"
    others = ("flush acks", "collect", "pause", "drop", "seek to the beginning")
    for world, claim in (("expired", "claim"), ("expired_shared", "claim, shared")):
        yield from each(world, (passes,), (passes, claim, *others))
        yield Pair(world, (OPERATIONS[passes], UNDO_OTHERS), gates=(("B", "A", "commit"),), undone="A")


def coalescing() -> Iterable[Pair]:
    """Claims of messages with coalesce keys, while others take, end and publish such messages."""
    passes = "claim that passes what is superseded"
    others = ("flush acks", "sequence", "collect", "collect coalesce keys", "pause", "drop", "seek to the beginning")
    for world, claim in (("coalesced", "claim"), ("coalesced_shared", "claim, shared")):
        yield from each(world, (passes,), (passes, claim, *others))
        yield from each(world, ("sequence",), ("sequence", "collect coalesce keys"))
    yield from each("coalesced_shared", ("redeliver, shared",), ("redeliver, shared", passes, "claim, shared"))
    yield Pair("coalesced_later", (OPERATIONS["redeliver, shared"], both("sequence", "claim, shared")))


def superseding() -> Iterable[Pair]:
    """What gives up messages because of later ones, while something takes these away, or the others."""
    claims = ("claim that supersedes, with a filter", "claim that supersedes, with another filter")
    start = "give up what is superseded at its start"
    changes = ("register another filter", "override the filter")
    others = (
        "dead-letter now",
        "retry",
        "seek to the beginning",
        "seek to the end",
        "drop",
        "redrive",
        "discard",
        "replay a range",
        "flush acks",
        "collect",
        "collect coalesce keys",
        "pause",
        "sweep",
    )
    for world, mode in (("superseding", "set_mode shared"), ("superseding_shared", "set_mode ordered")):
        yield from each(world, claims[:1], (*claims, *changes, *others, mode))
        yield from each(world, (start,), (start, *claims, *changes, *others, mode))
        for first in (claims[0], start):
            for change in changes:
                yield Pair(world, (OPERATIONS[first], both(change, claims[1])))
            yield Pair(world, (OPERATIONS[first], both("register another filter", "seek to the beginning", claims[1])))
        yield Pair(world, (OPERATIONS[claims[0]], UNDO_OTHERS), gates=(("B", "A", "commit"),), undone="A")
    for world in ("superseding_expired", "superseding_expired_shared"):
        yield from each(world, claims[:1], ("claim that passes what has expired", *changes))


def breakdowns() -> Iterable[Pair]:
    """What tells that the work for a group breaks down, beside what else writes heartbeats."""
    yield from each("busy", ("report a breakdown",), ("beat", "deregister", "forget old heartbeats"))


def refusals() -> Iterable[Pair]:
    """The record of a process that refuses to start, beside another one and what else writes heartbeats."""
    yield from each("busy", ("refuse to start",), ("refuse to start", "beat", "forget old heartbeats"))


def relaying() -> Iterable[Pair]:
    """Relays beside each other, and beside what writes and deletes what they read."""
    yield from each("relayed", ("relay",), ("relay", "sequence", "collect", "claim", "publish"))
    yield from each("relayed", ("note a refusal",), ("note a refusal", "relay", "collect"))
    yield from each("relayed", ("relay from a log that went back",), ("sequence", "claim"))
    divide = "divide a topic's messages"
    yield from each("busy", (divide,), (divide, "sequence", "publish", "relay"))
    yield from each("busy", ("move a topic here",), ("claim", "sequence", "collect", "beat"))
    yield from each("busy", ("cancel a move",), ("sequence", "beat"))


def jobs() -> Iterable[Pair]:
    """What writes results of jobs."""
    changes = ("begin jobs", "end jobs", "cancel jobs", "restart jobs", "collect results")
    yield from all_of("with_jobs", changes)
    waits = ("let a job wait in its task", "let a job wait for long in its task", "flush waits of jobs")
    yield from each("with_jobs", waits, (*changes[:3], waits[1], waits[2]))
    retry, of_task = "retry jobs that wait", "cancel the jobs of a task"
    yield from each("with_waiting_jobs", (retry, of_task), (retry, of_task, "cancel jobs", "end jobs", "begin jobs"))
    yield from each("busy", ("enqueue jobs",), ("enqueue jobs", "sequence"))
    redriven = "insert results of redriven jobs"
    yield from each("busy", (redriven,), (redriven,))
    first, second = "end the first job of a stage", "end the second job of a stage"
    fail = "fail the second job of a stage"
    cancels = ("cancel a job of the second stage", "cancel a running job")
    yield from each("busy", ("enqueue a chain of jobs",), ("enqueue a chain of jobs", "sequence"))
    yield from each("with_chain", (first,), (second, fail, "store the starts of jobs", "collect results", *cancels))
    yield from each("with_chain", (fail,), (cancels[0], "restart the second job of a stage"))
    operators = "cancel jobs as operators do"
    others = (first, fail, "begin the jobs of a stage", "restart the second job of a stage", *cancels)
    yield from each("with_chain", (operators,), (operators, *others, "collect results"))
    yield from each("with_chain", (of_task,), (first, fail, operators))
    two = ("cancel jobs of two stages", "cancel jobs of two stages, the later first")
    waiting = ("end a job of a stage that waits", "fail a job of a stage that waits", "begin the jobs of a stage")
    yield from each("with_waiting_chain", two, (*two, *waiting, operators))
    unique = "enqueue a unique job"
    yield from each("with_unique_job", (unique,), (unique, "begin the jobs of a stage"))
    single, redrive = SINGLE, "redrive a unique job"
    yield from each("with_single_job", (single,), (single, "end jobs", "begin jobs", "cancel jobs"))
    yield from each("with_late_job", (single,), (single, "end jobs", "begin jobs"))
    yield from each("with_failed_single_job", (single, redrive), (single, redrive))
    skips = "end skipped jobs"
    yield from each("with_skipped_chain", (skips,), (skips, unique, first, fail, *others[2:], "collect results"))
    yield from each("with_chain", (skips,), (first, fail, "restart the second job of a stage"))
    yield from each("busy", ("enqueue jobs", "enqueue a chain of jobs"), (skips,))


def recurring() -> Iterable[Pair]:
    """Ticks of a schedule, while its row is changed, and while the job ends because of which ticks are skipped."""
    changes = (
        "tick",
        "register the schedule with other arguments",
        "register the schedule with other times",
        "run the schedule now",
        "pause the schedule",
        "resume the schedule",
        "delete the schedule",
        "note that the schedule is seen",
        "end the declaration of the schedule",
        "end the schedule's last job",
    )
    yield from all_of("scheduled", changes)
    yield from each("scheduled", ("tick",), ("sequence", "collect", "collect results"))
    yield from each("scheduled_free", ("tick",), (*changes[:-1], "sequence", "collect"))
    yield Pair("scheduled", (OPERATIONS["tick"], both("tick", "sequence", "tick")))
    yield Pair("scheduled", (OPERATIONS["tick"], both("pause the schedule", "resume the schedule")))


def edited_schedules() -> Iterable[Pair]:
    """Ticks of a schedule that people have made, while others edit it or create it, and the code declares it."""
    edits = (
        "tick",
        "edit the arguments of the schedule",
        "edit the times of the schedule",
        "disable the schedule",
        "delete the schedule",
        "register the schedule with other arguments",
    )
    yield from all_of("scheduled_by_people", edits)
    create = "create the schedule"
    yield from each("busy", (create,), (create, "register the schedule with other times"))
    yield from each("scheduled_by_people", (create,), ("delete the schedule",))


def debouncing() -> Iterable[Pair]:
    """Passes of the sequencer over debounced messages, while these are published, cancelled and rescheduled."""
    changes = (
        "publish a debounced message",
        "cancel the last debounced message",
        "cancel a debounced message",
        "cancel a debounced message, rolled back",
        "reschedule a debounced message",
        "collect debounced messages",
    )
    yield from each("debounced", ("sequence",), ("sequence", *changes))
    yield from all_of("debounced", changes)
    for change in changes[1:5]:
        yield Pair("debounced", (OPERATIONS["sequence"], both(change, "sequence")))


def quarantining() -> Iterable[Pair]:
    """Passes of the sequencer that set messages aside, and operators who take messages out of the quarantine."""
    operators = ("requeue", "delete quarantined")
    others = ("publish", "publish a duplicate", "cancel scheduled", "deliver scheduled now", "claim", "collect")
    yield from each("refused", ("sequence",), ("sequence", *operators, *others))
    yield from all_of("refused", operators)
    for operator in operators:
        yield Pair("refused", (OPERATIONS[operator], both("requeue", "sequence")))


def filters() -> Iterable[Pair]:
    """Claims under a filter, while it is changed."""
    claims = ("claim with a filter", "claim with another filter", "claim with a filter and flush")
    changes = ("register another filter", "register another filter and publish", "override the filter")
    others = (
        "flush acks",
        "flush failures",
        "collect",
        "sequence",
        "pause",
        "drop",
        "seek to the beginning",
        "seek to the end",
    )
    for world in ("filtered", "filtered_shared"):
        yield from each(world, (*claims, *changes), (*claims, *changes))
        yield from each(world, claims[:1], (*others, "redrive"))
        # The claim's COMMIT has an unknown outcome.
        yield Pair(world, (OPERATIONS[claims[0]], UNDO_OTHERS), gates=(("B", "A", "commit"),), undone="A")
        yield Pair(world, (OPERATIONS[claims[0]], both("register another filter", "seek to the beginning")))
        yield Pair(world, (OPERATIONS[claims[0]], both("register another filter and publish", claims[1])))
    yield from each("filtered_shared", claims[:1], ("retry", "set_mode ordered"))
    yield from each("filtered", claims[:1], ("retry", "set_mode shared", "release leases"))
    for world, turn in (("fresh_filtered", "a turn, ordered"), ("fresh_filtered_shared", "a turn, shared")):
        yield from each(world, (turn,), (turn, *changes, "seek to the beginning", "collect"))


def special() -> Iterable[Pair]:
    """Shapes that no two operations have by themselves."""
    # Frozen; run again by another, and what could follow; then it goes on.
    for first, then in (
        ("seek to the beginning", ("seek to the beginning", "claim", "pause")),
        ("seek to the beginning", ("seek to the end", "seek to the beginning", "claim")),
        ("seek to the end", ("seek to the end", "claim", "pause")),
        ("drop", ("drop", "join")),
        ("drop", ("drop", "join", "pause")),
        ("retry", ("retry", "claim again")),
        ("retry later", ("retry later", "claim again")),
        ("retry", ("drop", "join")),
        ("retry", ("drop", "join", "fail everything")),
        ("redrive", ("redrive", "sequence")),
        ("discard", ("redrive", "sequence", "a turn, ordered")),
        ("collect", ("collect", "sequence", "claim")),
        ("take over", ("take over", "release leases")),
        ("join", ("drop", "join")),
        ("queueseek g t earliest --noinput", ("queueseek g t earliest --noinput", "claim", "pause")),
        ("queuedropgroup g t --noinput", ("queuedropgroup g t --noinput", "join")),
        ("queueretry g t --noinput", ("queueretry g t --noinput", "claim again")),
        ("queueredrive t --noinput", ("queueredrive t --noinput", "sequence")),
        ("queuediscard t --reason none --noinput", ("queueredrive t --noinput", "sequence")),
        ("queuegc", ("queuegc", "sequence", "claim")),
    ):
        yield Pair("busy", (OPERATIONS[first], both(*then)))
    for first, then in (
        ("set_mode shared", ("set_mode shared", "set_mode ordered")),
        ("join", ("set_mode shared", "set_mode ordered")),
    ):
        yield Pair("forsaken", (OPERATIONS[first], both(*then)))
    # What one has seen and another has done since.
    for world, first, then in (
        ("busy", "cancel scheduled", ("sequence, later",)),
        ("busy", "move scheduled", ("sequence, later",)),
        ("busy", "cancel in a transaction", ("sequence, later",)),
        ("forsaken", "take over", ("beat", "verify leases")),
        ("fresh", "drop", ("drop", "join")),
        ("emptied", "drop drained leases", ("sequence", "take over")),
        ("emptied", "collect", ("sequence", "claim", "ack everything")),
        ("behind", "seek to the beginning", ("sweep", "collect")),
        ("behind", "seek to the end", ("sweep", "collect")),
        ("behind", "drop", ("sweep", "collect")),
        ("behind", "claim and flush", ("sweep", "collect")),
    ):
        yield Pair(world, (OPERATIONS[first], both(*then)))
    # The COMMIT's answer was lost: the undo comes when the COMMIT has been sent, whether it has arrived or not.
    late = (("B", "A", "commit"),)
    for world, name in (("busy", "claim"), ("shared", "claim, shared"), ("forsaken", "claim again")):
        yield Pair(world, (OPERATIONS[name], UNDO_OTHERS), gates=late, undone="A")
    yield Pair("forsaken", (*of(["claim"]), UNDO_OTHERS, *of(["take over"])), gates=late, undone="A")
    # Whole subscribers and whole commands.
    for world, mode in (("fresh", "ordered"), ("fresh_shared", "shared")):
        for kind in ("a turn", "an atomic turn"):
            name = f"{kind}, {mode}"
            yield Pair(world, tuple(of((name, name))), once=True)
            for other in ("seek to the beginning", "drop", "collect", "pause", "revoke leases", "sequence", "queuegc"):
                yield Pair(world, tuple(of((name, other))))
    commands = [name for name in OPERATIONS if name.startswith("queue")]
    yield from each("busy", commands, ("claim", "claim and flush", "sequence", *commands))
    yield from each(
        "busy",
        ("override an option",),
        (
            "override an option",
            "override another option",
            "claim and flush",
            "pause",
            "drop",
            "seek to the end",
            "a turn, ordered",
        ),
    )
    limited = ("claim with limits, shared", "flush and release slots", "collect slots", "register limits")
    yield from each(
        "limited",
        limited,
        (*limited, "claim, shared", "flush failures", "sequence", "pause", "drop", "seek to the end", "retry", "undo"),
    )
    # From starts of their own.
    yield from each("fresh", ("join",), ("join", "take over", "set_mode shared", "drop", "seek to the end", "sequence"))
    yield from each("fresh", ("set_mode shared",), ("set_mode shared", "set_mode ordered", "beat of a newcomer"))
    yield from each(
        "all_settled",
        ("collect",),
        (
            "seek to the beginning",
            "collect",
            "drop drained leases",
            "drop",
            "publish",
            "join",
            "register another group from the beginning",
        ),
    )
    yield from each("all_settled", ("drop drained leases",), ("sequence", "revoke leases", "release leases"))
    yield from each(
        "emptied", ("collect",), ("sequence", "a turn, ordered", "seek to the beginning", "join", "collect")
    )
    yield from each("emptied", ("drop drained leases",), ("sequence", "take over", "claim"))
    others = ("sequence", "take over", "claim", "join", "a turn, ordered", "seek to the beginning", "collect leases")
    yield from each("all_settled", ("collect leases",), (*others, "drop drained leases", "drop"))
    yield from each("emptied", ("collect leases",), others)
    yield from each(
        "buried", ("redrive", "discard", "replace"), ("redrive", "discard", "replace", "drop", "collect", "sequence")
    )
    yield from each("busy", ("erase",), ("erase", "claim", "sequence", "collect", "pause"))
    yield from each("coalesced_later", ("erase",), ("sequence",))
    yield from each("busy", ("drop the reader",), ("drop the reader", "collect"))
    yield from each("paused", ("resume",), ("resume", "pause", "claim", "seek to the beginning", "drop", "join"))
    yield from each("paused", ("seek to the end",), ("claim and flush", "flush acks", "resume"))


def situations() -> Iterable[Pair]:
    """What is seldom met."""
    # Ends and claims of other kinds.
    kinds = ("flush a last failure", "flush a deleted message", "claim, strict", "retry one", "redrive one")
    yield from each(
        "busy",
        kinds,
        (
            *kinds,
            "claim and flush",
            "claim again",
            "flush failures",
            "ack in a transaction",
            "dead-letter now",
            "retry",
            "redrive",
            "sequence",
            "collect",
            "drop",
            "seek to the beginning",
            "set_mode shared",
            "pause",
        ),
    )
    yield from each("shared", kinds[:2], (*kinds[:2], "claim, shared", "flush failures", "retry one", "extend all"))
    # Of the lost subscriber's deliveries, and the frozen one's, the attempts are used up: claims dead-letter them.
    yield from each(
        "used_up",
        ("take over", "claim again", "a turn, ordered"),
        (
            "take over",
            "claim again",
            "a turn, ordered",
            "flush acks",
            "flush failures",
            "ack in a transaction",
            "retry",
            "dead-letter now",
            "seek to the beginning",
            "drop",
            "set_mode shared",
            "collect",
        ),
    )
    # Retries are moved to another time, also while others bring them back, claim and settle.
    yield from each(
        "busy",
        ("retry later",),
        (
            "retry later",
            "retry",
            "retry one",
            "claim again",
            "claim, strict",
            "claim and flush",
            "flush failures",
            "dead-letter now",
            "seek to the beginning",
            "drop",
            "set_mode shared",
            "pause",
            "a turn, ordered",
        ),
    )
    yield from each("shared", ("retry later",), ("retry later", "retry", "claim, shared", "flush failures"))
    # The lost subscriber's deliveries, and the frozen one's, are not lost for the first time: claims make them wait.
    meanwhile = ("flush acks", "flush failures", "ack in a transaction", "record a start", "release everything")
    ends = ("seek to the beginning", "drop", "collect")
    yield from each(
        "lost_again",
        ("take over", "claim again", "a turn, ordered"),
        ("take over", "claim again", "a turn, ordered", *meanwhile, *ends, "retry", "dead-letter now"),
    )
    yield from each(
        "lost_again_shared", ("claim, shared",), ("claim, shared", *meanwhile, *ends, "extend all", "retry")
    )
    # A group that handles dead letters, while operators take them.
    dead = ("claim of dead letters", "flush acks of dead letters", "reject dead letters")
    yield from each(
        "undertaker",
        (*dead, "redrive", "discard", "replace", "queueredrive t --noinput", "collect"),
        (*dead, "redrive", "discard", "replace", "collect", "sequence"),
    )
    # A seek, or a drop, of a process that died: the group is paused until somebody runs it again.
    again = ("seek to the beginning", "seek to the end", "drop", "join", "a turn, ordered")
    meanwhile = (
        "claim",
        "claim and flush",
        "flush acks",
        "flush failures",
        "ack in a transaction",
        "settle in a transaction",
        "undo",
        "sweep",
        "create offsets rows",
        "release everything",
        "take over",
        "resume",
        "retry",
        "dead-letter now",
        "set_mode shared",
        "collect",
    )
    for world in ("seek_interrupted", "drop_interrupted"):
        yield from each(world, again, (*again, *meanwhile))
    # Several transactions where there is otherwise one.
    for first, others in (
        ("seek to the beginning", ("seek to the beginning", "drop", "claim", "flush acks", "settle in a transaction")),
        ("seek to the end", ("seek to the end", "flush failures", "sweep")),
        ("drop", ("drop", "flush failures", "settle in a transaction", "claim again", "beat")),
        ("retry", ("retry", "claim again", "drop")),
        ("retry later", ("retry later", "retry", "claim again")),
        ("collect", ("collect", "sequence", "seek to the beginning")),
    ):
        for other in others:
            yield Pair("busy", tuple(of((first, other))), by_ones=True)
    for first, then in (
        ("seek to the beginning", ("seek to the beginning", "claim", "pause")),
        ("drop", ("drop", "join", "pause")),
    ):
        yield Pair("busy", (OPERATIONS[first], both(*then)), by_ones=True)
    for first, other in (("redrive", "redrive"), ("redrive", "discard"), ("discard", "discard"), ("redrive", "drop")):
        yield Pair("buried", tuple(of((first, other))), by_ones=True)
    yield Pair("all_settled", tuple(of(("collect", "collect"))), by_ones=True)


def exits() -> Iterable[Pair]:
    """The last statements of a process, or the first of the one that replaces it, beside those of everybody else."""
    mine = ("ack in a transaction", "settle in a transaction", "record a start", "flush acks", "flush failures")
    others = (
        "release everything",
        "sweep",
        "drop",
        "seek to the beginning",
        "seek to the end",
        "pause",
        "retry",
        "dead-letter now",
    )
    release, unstarted = "release what is cut off", "release what has not started"
    ordered = ("claim", "claim and flush", "take over", "revoke leases", "set_mode shared", "a turn, ordered")
    shared = ("claim, shared", "claim and flush, shared", "extend all", "set_mode ordered", "a turn, shared")
    yield from each("busy", (release,), (release, *mine, *others, *ordered))
    yield from each("shared", (release,), (release, *mine, *others, *shared))
    # It was frozen, and does not know that it counts as gone.
    yield from each("forsaken", (release,), ("take over", "join", "claim again", "record a start"))
    yield from each("lost_again_shared", (release,), ("claim, shared", "record a start", "ack in a transaction"))
    # The process is dead, but statements that it has sent may still run.
    yield from each("busy", (unstarted,), (unstarted, *mine[:1], *others, *ordered[2:]))
    yield from each("shared", (unstarted,), (unstarted, *mine[:1], *others, *shared[:1], *shared[3:]))
    yield from each("forsaken", (unstarted,), ("take over", "join", "claim again"))
    yield from each("lost_again_shared", (unstarted,), ("claim, shared",))
    dead = "release everything of a dead process"
    yield from each("busy", (dead,), (dead, "beat", "forget a heartbeat", "take over", "claim", "flush acks", "drop"))
    yield from each("shared", (dead,), (dead, "beat", "claim, shared", "flush acks"))


def replays() -> Iterable[Pair]:
    """A replay, and a test message, against what meets them: the group, the sequencer, and themselves."""
    others = ("publish", "sequence", "collect", "pause", "drop", "seek to the beginning", "claim", "flush acks")
    yield from each("busy", ("replay a range",), ("replay a range", *others))
    yield from each("busy", ("publish a test message",), ("publish a test message", "publish", "sequence"))


def triples() -> Iterable[Pair]:
    for world, names in (
        ("busy", ("drop", "join", "claim")),
        ("busy", ("seek to the beginning", "flush failures", "claim")),
        ("busy", ("sequence", "sequence", "cancel scheduled")),
        ("busy", ("pause", "resume", "claim")),
        ("forsaken", ("take over", "flush acks", "seek to the beginning")),
        ("forsaken", ("set_mode shared", "join", "claim")),
        ("forsaken", ("join", "join", "claim and flush")),
        ("with_single_job", (SINGLE, SINGLE, "end jobs")),
        ("emptied", ("drop drained leases", "sequence", "take over")),
        ("all_settled", ("collect", "collect", "seek to the beginning")),
        ("shared", ("claim, shared", "claim, shared", "flush failures")),
        ("shared", ("retry", "claim, shared", "flush an ack behind a failure")),
        ("buried", ("redrive", "sequence", "drop")),
    ):
        yield Pair(world, tuple(of(names)))


def pairs() -> dict[str, Pair]:
    """All of them, by name."""
    found: dict[str, Pair] = {}
    for one in (
        *all_of("busy", (*PUBLISHERS, *HOUSEKEEPING, *GROUPS, *SUBSCRIBER, *NEWCOMERS, *OPERATORS, *WHOLE)),
        *all_of("shared", SHARED),
        *each("forsaken", MEANWHILE, (*MEANWHILE, *STALE)),
        *each("forsaken_shared", ("claim, shared", "set_mode ordered", "a turn, shared"), SHARED),
        *filters(),
        *expiry(),
        *coalescing(),
        *superseding(),
        *debouncing(),
        *quarantining(),
        *relaying(),
        *breakdowns(),
        *refusals(),
        *jobs(),
        *recurring(),
        *edited_schedules(),
        *sql_clients(),
        *special(),
        *situations(),
        *exits(),
        *replays(),
        *triples(),
    ):
        found.setdefault(one.name, one)
    return found
