"""The values of a claim: who claims, what it asks for, and what it gets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.service.clocks import DatabaseClock
from django_mysqlqueue.service.deliveries import Claimed, Flushed, Holding, Settlement
from django_mysqlqueue.service.groups import Fence, OptionColumns
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.slots import Rest
from django_mysqlqueue.service.subsets import EVERYTHING, Subset

Refusal = Literal["dropped", "mode", "paused", "options"]


class Rules(Protocol):
    """The options of a group that its claims follow: those of its handler."""

    @property
    def ref(self) -> GroupRef:
        """The group."""

    @property
    def mode(self) -> str:
        """``"ordered"`` or ``"shared"``."""

    @property
    def shared(self) -> bool:
        """Whether the mode is shared."""

    @property
    def max_attempts(self) -> int | None:
        """Number of attempts after which a message is dead-lettered; None: no limit."""

    @property
    def visibility_timeout(self) -> float:
        """Seconds for which other subscribers do not claim a delivery (shared mode)."""

    @property
    def on_failure(self) -> str:
        """``"block"``: in ordered mode, nothing of a partition is taken before its lowest unsettled row."""

    @property
    def on_expiry(self) -> str:
        """``"skip"``: messages that have expired are passed."""

    @property
    def backoff(self) -> Backoff:
        """The wait after the loss of a suspected poison message."""

    @property
    def filter(self) -> FilterPolicy | None:
        """Which messages the group gets; None: all."""


class Claimant(NamedTuple):
    """A subscriber's right to claim for a group."""

    rules: Rules
    subscriber: str
    options: OptionColumns | None = None
    """The columns of the group row that the rules come from: a claim under others takes nothing. None: any."""
    clock: DatabaseClock | None = None
    """The clock that the claimant knows: after a step, what others hold is not taken for lost. None: any."""

    @property
    def ref(self) -> GroupRef:
        """The group."""
        return self.rules.ref

    def refusal(self, fence: Fence | None) -> Refusal | None:
        """Return why it may claim nothing: because the group row says something else than it knows."""
        if fence is None:
            return "dropped"
        if fence.mode != self.rules.mode:
            return "mode"
        if fence.paused:
            return "paused"
        return "options" if self.options not in (None, fence.options) else None


# -- what a claim asks for --------------------------------------------------------


class Want(NamedTuple):
    """A request for messages of one partition: redeliveries, or else messages above its position."""

    key: str
    due: tuple[int, ...] = ()
    """Offsets that are probably due for redelivery, in ascending order (ordered mode)."""
    look_at: int = 0
    """Number of messages above the position to look for."""


class Due(NamedTuple):
    """A request for redeliveries of a shared group, oldest first, from any partition."""

    most: int
    """Maximum number of redeliveries to take."""
    window: int = 0
    """Number of due rows to look at for that, because the first ones may be locked."""
    exclude: Collection[tuple[str, int]] = ()
    """The (partition key, offset) of deliveries that the claimant already holds."""
    after_clock_step: bool = False
    """Whether to look for rows that a clock, since corrected, left far in the future."""
    with_slots: int = 2**62
    """Maximum number of redeliveries with slots to take."""
    subset: Subset = EVERYTHING
    """The partitions from which they are taken."""


class Budget(NamedTuple):
    """How much a claim may take. The first message is always taken, however large it is."""

    rows: int = 2**62
    """Maximum number of messages."""
    payload: int = 2**62
    """Maximum number of payload bytes."""
    suspects: int = 2**62
    """Maximum number of suspected poison messages. They start one after another, so those that wait in the process
    would keep others out of it."""


UNLIMITED = Budget()


class ClaimRequest(NamedTuple):
    """The settlements that a claim transaction writes, and the messages that it takes."""

    claimant: Claimant
    wants: Sequence[Want]
    """The messages to take, by partition. In ordered mode, the claimant must own the partitions."""
    token: int
    """The token of the new deliveries, from ``new_token``. It must never have been used."""
    settlements: Sequence[Settlement] = ()
    """Settlements of earlier deliveries of the group. They are written first, as by ``settling.flush``."""
    also: Collection[str] = ()
    """Further partitions whose watermarks can advance."""
    due: Due | None = None
    """The redeliveries to take in shared mode."""
    budget: Budget = UNLIMITED
    passes: bool = False
    """Whether to pass messages that are superseded or, with ``on_expiry="skip"``, have expired. Otherwise, that is
    found when they start."""
    holding: Holding | None = None
    """What the claimant holds, if the group has limits."""


# -- what it finds ----------------------------------------------------------------


class Seen(Enum):
    """What a claim has found of a partition of which it wanted messages."""

    LOST = "lost"
    """The claimant does not own its lease."""
    MISSING = "missing"
    """It has no offsets row: create the row, and claim again."""
    MORE = "more"
    """Its messages above the position were looked at. There may be more."""
    DRAINED = "drained"
    """Under its lock, there were no more messages above the position."""


class Left(Enum):
    """Why a claim has not taken a redelivery. Except for those that are settled, they stay due."""

    SETTLED = "settled"
    """It was settled before, or is superseded."""
    LOCKED = "locked"
    """Another transaction has locked its row. In ordered mode, nothing of its partition is taken."""
    SUSPECT = "suspect"
    """It is a suspected poison message more than ``Budget.suspects``."""
    NEEDS_SLOT = "needs slot"
    """It needs a slot, as did as many before it as ``Due.with_slots`` allows."""


class Later(NamedTuple):
    """A redelivery that is not due yet, or that the claim makes wait: after a loss, or for a slot."""

    until: int
    """When it is due, in epoch milliseconds."""
    is_lost: bool = False
    """Whether it waits since its subscriber was lost. In ordered mode, nothing behind it is claimed."""


@dataclass(slots=True)
class Claim:
    """The result of a claim. After the COMMIT, this process holds the deliveries."""

    flushed: Flushed
    fence: Fence | None = None
    """The group row as the claim found it; None if the group was dropped."""
    refused: Refusal | None = None
    """Why nothing was taken; None: the claim was allowed."""
    deliveries: list[Claimed] = field(default_factory=list)
    dead: list[tuple[Claimed, str]] = field(default_factory=list)
    """Suspected poison messages that had used up their attempts, with the error. They are in the DLQ now."""
    partitions: dict[str, Seen | Rest] = field(default_factory=dict)
    """What was found of each wanted partition; a ``Rest``: its next message waits for a slot."""
    left: dict[tuple[str, int], Left | Later] = field(default_factory=dict)
    """By partition and offset: expected redeliveries that were not taken."""
    rest: Rest | None = None
    """Why no further message of the group gets a slot."""
    passed: dict[str, int] = field(default_factory=dict)
    """Number of messages that were passed, by reason (``rollups.PASSED``)."""

    def count_passed(self, reason: str) -> None:
        """Note that a message was passed."""
        self.passed[reason] = self.passed.get(reason, 0) + 1
