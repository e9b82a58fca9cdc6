"""The values of a claim: who claims, what it asks for, and what it gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

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


@dataclass(frozen=True, slots=True)
class Claimant:
    """A subscriber's right to claim for a group."""

    rules: Rules
    subscriber: str
    subset: Subset = EVERYTHING
    """The partitions from which redeliveries are taken in shared mode."""
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


@dataclass(frozen=True, slots=True)
class Want:
    """A request for messages of one partition: redeliveries, or else messages above its position."""

    key: str
    due: tuple[int, ...] = ()
    """Offsets that are probably due for redelivery, in ascending order (ordered mode)."""
    look_at: int = 0
    """Number of messages above the position to look at."""


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
    lost: set[str] = field(default_factory=set)
    """Partitions whose lease the claimant no longer owns."""
    missing: set[str] = field(default_factory=set)
    """Partitions without an offsets row: create the row, and claim again."""
    looked_at: set[str] = field(default_factory=set)
    """Partitions whose messages above the position were looked at."""
    drained: set[str] = field(default_factory=set)
    """Partitions that had, under their lock, no messages above the position."""
    settled: set[tuple[str, int]] = field(default_factory=set)
    """Expected redeliveries that are already settled."""
    locked: set[str] = field(default_factory=set)
    """Partitions that were left out because another transaction has locked a due row (ordered mode)."""
    later: dict[tuple[str, int], int] = field(default_factory=dict)
    """Redeliveries that are not due yet, or wait after a loss or for a slot → when they are due, in epoch
    milliseconds."""
    lost_later: set[tuple[str, int]] = field(default_factory=set)
    """Those of them that were lost with their subscribers. In ordered mode, nothing behind them is claimed."""
    limited: dict[str, Rest] = field(default_factory=dict)
    """Partitions whose next message waits for a slot."""
    held_up: set[str] = field(default_factory=set)
    """Partitions with a suspected poison message that ``max_suspects`` left out. It stays due."""
    has_due: bool = False
    """Whether ``with_slots`` has left out redeliveries. They stay due."""
    rest: Rest | None = None
    """Why no further message of the group gets a slot."""
    began: float = 0.0
    """The monotonic time at which the database's time of the claim was asked for."""
    passed: Counter[str] = field(default_factory=Counter)
    """Number of messages that were passed, by reason (``rollups.PASSED``)."""


@dataclass(frozen=True, slots=True)
class Due:
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


@dataclass(frozen=True, slots=True)
class ClaimRequest:
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
    max_bytes: int = 2**62
    """Maximum number of payload bytes to take. The first message is always taken."""
    max_rows: int = 2**62
    """Maximum number of messages to take."""
    max_suspects: int = 2**62
    """Maximum number of suspected poison messages to take. They start one after another, so those that wait in the
    process would keep others out of it."""
    passes: bool = False
    """Whether to pass messages that are superseded or, with ``on_expiry="skip"``, have expired. Otherwise, that is
    found when they start."""
    holding: Holding | None = None
    """What the claimant holds, if the group has limits."""
