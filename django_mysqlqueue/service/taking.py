"""The transaction of a claim: what it may still take, and what its group's features say of a message."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from django_mysqlqueue.delivery_limits import NO_KEY
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service import delivery_events
from django_mysqlqueue.service.claims import Claim, ClaimRequest, Want
from django_mysqlqueue.service.deliveries import Candidate, Claimed, Slot
from django_mysqlqueue.service.job_outcomes import Jobs
from django_mysqlqueue.service.messages import decode_metadata
from django_mysqlqueue.service.slots import Reservation, Rest
from django_mysqlqueue.service.superseding import Coalescing
from django_mysqlqueue.service.watermarks import Offsets
from django_mysqlqueue.sql.session import Session

Verdicts = dict[tuple[str, int], str]
"""By partition and offset of messages that are passed, why: ``"filtered"``, or an outcome."""


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


class Taking:
    """The state of a claim's transaction, under the group's lock."""

    def __init__(
        self,
        session: Session,
        request: ClaimRequest,
        claim: Claim,
        offsets: Mapping[str, Offsets],
        *,
        now: int,
        jobs: Jobs | None,
    ) -> None:
        claimant = request.claimant
        self.session = session
        self.request = request
        self.claim = claim
        self.ref = claimant.ref
        self.rules = claimant.rules
        self.shared = claimant.rules.shared
        self.offsets = offsets
        """By partition whose offsets row the claim has locked."""
        self.now = now
        """The database's time in epoch milliseconds."""
        timeout = int(claimant.rules.visibility_timeout * 1000) if self.shared else 0
        self.until = now + timeout
        """When the deliveries become visible to other subscribers (shared mode)."""
        self.is_doubtful = self.shared and claimant.clock is not None and claimant.clock.is_doubtful(timeout)
        """Whether the database's clock has stepped, so that deliveries that others hold look over (shared mode)."""
        self.budget = Budget(request.max_bytes, request.max_rows)
        self.closed: set[str] = set()
        """Partitions of which this claim takes nothing more, so that nothing overtakes a message (ordered mode)."""
        self.slots: Reservation | None = None
        """None if the group has no limits."""
        if request.holding is not None:
            self.slots = Reservation(session, self.ref, request.holding, claimant.clock)
        self._jobs = jobs
        self._coalescing: Coalescing | None = None

    def wants(self) -> list[Want]:
        """Return the wants of partitions that the claimant still owns."""
        return [want for want in self.request.wants if want.key not in self.claim.lost]

    # -- features: a claim of messages without them runs none of their code ----

    @property
    def coalescing(self) -> Coalescing:
        """What is known about coalesce keys. Nothing is read before a message has one."""
        if self._coalescing is None:
            policy, doubtful = self.rules.filter, self.is_doubtful
            self._coalescing = Coalescing(
                self.session, self.ref, policy, shared=self.shared, now=self.now, is_doubtful=doubtful
            )
        return self._coalescing

    def columns(self, keys: Collection[str], alias: str = "") -> str:
        """Return the columns that a claim needs of messages in some partitions: ``Candidate`` from ``size`` on."""
        key, by_metadata = "NULL", False
        if self.slots is not None and any(map(self.slots.has_several_keys, keys)):
            by_metadata = self.slots.limits.limit_by is not None
            key = "NULL" if by_metadata else f"{alias}publisher_key"
        metadata = f"{alias}metadata" if by_metadata or self.rules.filter is not None else "''"
        return f"{alias}size, {alias}expires_at, {alias}coalesce_key, {key} p, {metadata} m"

    def judge(self, messages: Sequence[Candidate]) -> Verdicts:
        """Return which messages above the positions are passed, and read the accounts of the slots for the others.

        A message is filtered unless the group has given up others for it; an expired one supersedes no other.
        """
        verdicts: Verdicts = {}
        if self.rules.filter is not None or any(one.expires_at is not None or one.coalesce_key for one in messages):
            mine = ("", self.ref.group)
            self._pass([message for message in messages if message.target in mine], verdicts)
        if self.slots is not None:
            self.slots.read_for([message for message in messages if message[:2] not in verdicts])
        return verdicts

    def _pass(self, messages: Sequence[Candidate], verdicts: Verdicts) -> None:
        unmatched: dict[tuple[str, int], Candidate] = {}
        keys: dict[tuple[str, int], str] = {}
        for message in messages:
            place = message.key, message.offset
            if not self._matches(message):
                unmatched[place] = message
                verdicts[place] = "filtered"
            elif self._has_expired(message):
                verdicts[place] = Outcome.EXPIRED
                continue
            if message.coalesce_key:
                keys[place] = message.coalesce_key
        if not keys:
            return
        for place in self.coalescing.read(keys, unmatched=unmatched.keys()):
            del verdicts[place]
            if self._has_expired(unmatched[place]):
                verdicts[place] = Outcome.EXPIRED
        verdicts |= {place: Outcome.SUPERSEDED for place in keys if self.passes_superseded(*place)}

    def _matches(self, message: Candidate) -> bool:
        """Return whether the group's filter matches a message. Those that are only for this group were redriven."""
        policy = self.rules.filter
        return policy is None or bool(message.target) or policy.matches(decode_metadata(message.metadata))

    def _has_expired(self, message: Candidate) -> bool:
        """Return whether the claim passes a message because it has expired."""
        at = message.expires_at
        return at is not None and at <= self.now and self.request.passes and self.rules.on_expiry == "skip"

    def passes_superseded(self, key: str, offset: int) -> bool:
        """Return whether the claim passes a message because a later one has its coalesce key."""
        return self.request.passes and self._coalescing is not None and self._coalescing.is_superseded(key, offset)

    def waits_until(self, key: str, offset: int) -> int | None:
        """Return until when a message waits for another one with its coalesce key (shared mode), or None."""
        return None if self._coalescing is None else self._coalescing.waits_until(key, offset)

    def record_passed(self, ended: Sequence[tuple[str, int, Outcome]]) -> None:
        """Record messages that the claim has settled without a call: partition, offset and outcome of each."""
        delivery_events.record_passed(self.session, self.ref, ended, self.request.claimant.subscriber)
        if self._jobs is not None and ended:
            self._jobs.passed(ended)

    # -- taking ----------------------------------------------------------------

    def take(self, message: Candidate, *, retries: int = 0, suspect: bool = False) -> Claimed | Rest | None:
        """Return a delivery if this claim takes the message, with its slot if it needs one.

        Returns:
            None if it does not fit; why there is no slot for it otherwise.
        """
        if not self.budget.fits(message.size):
            return None
        slot: Slot | None = None
        if self.slots is not None and self.slots.is_needed(message.key, message.offset):
            if self.claim.rest is not None:
                return None
            got = self.slots.take_for(message.key, message.offset)
            if isinstance(got, Rest):
                if got.key != NO_KEY:
                    return got
                self.claim.rest = got
                return None
            slot = got
        self.budget.spend(message.size)
        if self._coalescing is not None:
            self._coalescing.took(message.key, message.offset)
        return self.claimed(message, retries=retries, suspect=suspect, slot=slot)

    def claimed(
        self, message: Candidate, *, retries: int = 0, suspect: bool = False, slot: Slot | None = None
    ) -> Claimed:
        """Return the delivery of a message."""
        return Claimed(
            self.ref,
            message.key,
            message.offset,
            self.request.token,
            retries + 1,
            suspect,
            message.size,
            self.now,
            self.request.claimant.subscriber,
            slot,
        )

    def store(self) -> None:
        """Write what the features have noted: coalesce keys, then slots."""
        if self._coalescing is not None:
            self._coalescing.store()
        if self.slots is not None:
            self.claim.flushed.held = self.slots.store()
