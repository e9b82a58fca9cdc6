"""The transaction of a claim: what it may still take, and with which slots."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from django_mysqlqueue.delivery_limits import NO_KEY
from django_mysqlqueue.limits import PARTITION_PREFIX, lane_of
from django_mysqlqueue.service import messages
from django_mysqlqueue.service.claims import Claim, Claimant, ClaimRequest, Want
from django_mysqlqueue.service.deliveries import Claimed
from django_mysqlqueue.service.slots import Reservation, Rest
from django_mysqlqueue.service.superseding import Coalescing
from django_mysqlqueue.sql.session import Session


class Candidate(NamedTuple):
    """What the key of a message for the limits depends on, as far as the group's limits need it."""

    key: str
    """Its partition."""
    offset: int
    publisher_key: str | None
    metadata: str


class Budget:
    """The payload bytes and messages that a claim may still take. The first message always fits."""

    def __init__(self, max_bytes: int, max_rows: int) -> None:
        self._left = max_bytes
        self._rows = max_rows
        self._any = False
        self._full = False

    @property
    def is_spent(self) -> bool:
        """Whether nothing more fits."""
        return self._full or (self._any and self._rows <= 0)

    def fits(self, size: int) -> bool:
        """Return whether a message fits. After one was refused, all are: a smaller message must not overtake it."""
        self._full = self._full or (self._any and (size > self._left or self._rows <= 0))
        return not self._full

    def spend(self, size: int) -> None:
        """Take a message that fits."""
        self._any = True
        self._left -= size
        self._rows -= 1


@dataclass(frozen=True, slots=True)
class Taking:
    """The state of a claim's transaction, under the group's lock."""

    session: Session
    request: ClaimRequest
    now: int
    """The database's time in epoch milliseconds."""
    budget: Budget
    slots: Reservation | None
    """None if the group has no limits."""
    result: Claim
    coalescing: Coalescing
    locked: Collection[str]
    """Partitions whose offsets row the claim has locked."""
    closed: set[str] = field(default_factory=set)
    """Partitions of which this claim takes nothing more, so that nothing overtakes a message (ordered mode)."""
    is_doubtful: bool = False
    """Whether the database's clock has stepped, so that deliveries that others hold look over (shared mode)."""

    @property
    def claimant(self) -> Claimant:
        """The subscriber, and the rules of the group."""
        return self.request.claimant

    @property
    def until(self) -> int:
        """When the deliveries become visible to other subscribers (shared mode)."""
        return self.now + (self.claimant.visibility_ms or 0)

    def wants(self) -> list[Want]:
        """Return the wants of partitions that the claimant still owns."""
        return [want for want in self.request.wants if want.key not in self.result.lost]

    def claimed(self, key: str, offset: int, size: int, *, retries: int = 0, suspect: bool = False) -> Claimed:
        """Return a delivery that this claim may take."""
        return Claimed(
            self.claimant.ref,
            key,
            offset,
            self.request.token,
            retries + 1,
            suspect,
            size,
            self.now,
            self.claimant.subscriber,
        )

    def take(self, one: Claimed, limit_key: str) -> Claimed | Rest | None:
        """Return a delivery if this claim takes it, with its slot if it needs one.

        Returns:
            None if it does not fit; why there is no slot for it otherwise.
        """
        if not self.budget.fits(one.size):
            return None
        if self.slots is not None and self.needs_slot(limit_key):
            if self.result.rest is not None:
                return None
            slot = self.slots.take(limit_key)
            if isinstance(slot, Rest):
                if slot.key != NO_KEY:
                    return slot
                self.result.rest = slot
                return None
            one = one._replace(slot=slot)
        self.budget.spend(one.size)
        return one

    def columns(self, keys: Collection[str], alias: str = "") -> str:
        """Return the columns that a claim needs of messages in some partitions, in the order of ``Looked``."""
        has_keys = any(map(self.has_several_keys, keys))
        by_metadata = has_keys and self.claimant.limits.limit_by is not None
        metadata = f"{alias}metadata" if by_metadata or self.claimant.filter is not None else "''"
        key = f"{alias}publisher_key" if has_keys and not by_metadata else "NULL"
        return f"{alias}size, {alias}expires_at, {alias}coalesce_key, {key} p, {metadata} m"

    def needs_slot(self, limit_key: str) -> bool:
        """Return whether a message of a group with limits needs a slot.

        ``limit_key``: its key of the limits; ``NO_KEY``: only those of the group apply.
        """
        return limit_key != NO_KEY or self.claimant.limits.limits_group

    def has_several_keys(self, key: str) -> bool:
        """Return whether messages of a partition can have different keys of the limits."""
        limits = self.claimant.limits
        if self.slots is None or not limits.limits_keys:
            return False
        return limits.limit_by is not None or lane_of(key).partition.startswith(PARTITION_PREFIX)

    def limit_key(self, one: Candidate) -> str:
        """Return the key of the limits of a message."""
        limits = self.claimant.limits
        metadata = messages.decode_metadata(one.metadata) if one.metadata and limits.limit_by is not None else {}
        return limits.key_of(messages.publisher_key(one.key, one.publisher_key), metadata)

    def limit_keys(self, candidates: Collection[Candidate]) -> dict[tuple[str, int], str]:
        """Return the key of the limits for each message, after reading their accounts if any of them needs a slot."""
        if self.slots is None or not self.claimant.limits.limits_keys or not candidates:
            return {}
        found = {(one.key, one.offset): self.limit_key(one) for one in candidates}
        if any(map(self.needs_slot, found.values())):
            self.slots.read(found.values())
        return found
