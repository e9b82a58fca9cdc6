"""The transaction of a claim: what it may still take, and what its group's features say of a message."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from django_mysqlqueue.options.delivery_limits import NO_KEY
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service import delivery_events
from django_mysqlqueue.service.claims import Budget, Claim, ClaimRequest
from django_mysqlqueue.service.deliveries import Candidate, Claimed, Slot
from django_mysqlqueue.service.job_outcomes import Jobs
from django_mysqlqueue.service.messages import decode_metadata
from django_mysqlqueue.service.slots import Reservation, Rest
from django_mysqlqueue.service.superseding import Coalescing
from django_mysqlqueue.service.watermarks import Offsets
from django_mysqlqueue.sql.session import Session

Verdicts = dict[tuple[str, int], str]
"""By partition and offset of messages that are passed, why: ``"filtered"``, or an outcome."""


class Spending:
    """What is left of a claim's budget. The first message always fits."""

    def __init__(self, budget: Budget) -> None:
        self._rows, self._payload, self._suspects = budget
        self._any = False
        self._full = False

    @property
    def is_spent(self) -> bool:
        """Whether nothing more fits."""
        return self._full or (self._any and self._rows <= 0)

    def fits(self, size: int) -> bool:
        """Return whether a message fits. After one was refused, all are: a smaller message must not overtake it."""
        self._full = self._full or (self._any and (size > self._payload or self._rows <= 0))
        return not self._full

    def takes_suspects(self) -> bool:
        """Return whether another suspected poison message may be taken."""
        return self._suspects > 0

    def spend(self, size: int, *, suspect: bool) -> None:
        """Take a message that fits."""
        self._any = True
        self._payload -= size
        self._rows -= 1
        self._suspects -= suspect


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
        self.budget = Spending(request.budget)
        self.wants = request.wants
        """The wants of partitions that the claimant still owns."""
        if claim.partitions:
            self.wants = [want for want in request.wants if want.key not in claim.partitions]
        self.closed: set[str] = set()
        """Partitions of which this claim takes nothing more, so that nothing overtakes a message (ordered mode)."""
        self.slots: Reservation | None = None
        """None if the group has no limits."""
        if request.holding is not None:
            self.slots = Reservation(session, self.ref, request.holding, claimant.clock)
        self._jobs = jobs
        self.coalescing: Coalescing | None = None
        """What is known about coalesce keys; None if no message of the claim has one."""

    # -- features: a claim of messages without them runs none of their code ----

    def read_coalesce_keys(
        self, keys: Mapping[tuple[str, int], str], *, unmatched: Collection[tuple[str, int]] = (), were_claimed: bool
    ) -> set[tuple[str, int]]:
        """See ``Coalescing.read``."""
        if self.coalescing is None:
            policy, doubtful = self.rules.filter, self.is_doubtful
            self.coalescing = Coalescing(
                self.session, self.ref, policy, shared=self.shared, now=self.now, is_doubtful=doubtful
            )
        return self.coalescing.read(keys, unmatched=unmatched, were_claimed=were_claimed)

    def columns(self, keys: Collection[str], alias: str = "") -> str:
        """Return the columns that a claim needs of messages in some partitions: ``Candidate`` from ``size`` on."""
        key, by_metadata = "NULL", False
        if self.slots is not None and any(map(self.slots.has_several_keys, keys)):
            by_metadata = self.slots.limits.limit_by is not None
            key = "NULL" if by_metadata else f"{alias}publisher_key"
        metadata = f"{alias}metadata" if by_metadata or self.rules.filter is not None else "''"
        attempts = f", {alias}failure_count" if self._jobs is not None else ""
        return f"{alias}size, {alias}expires_at, {alias}coalesce_key, {key} p, {metadata} m{attempts}"

    def judge(self, candidates: Mapping[str, Sequence[Candidate]]) -> Verdicts:
        """Return which messages above the positions are passed, and read the accounts of the slots for the others.

        A message is filtered unless the group has given up others for it; an expired one supersedes no other.
        """
        verdicts: Verdicts = {}
        messages = list(chain.from_iterable(candidates.values()))
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
        revived = self.read_coalesce_keys(keys, unmatched=unmatched.keys(), were_claimed=False)
        for place in revived:
            del verdicts[place]
            if self._has_expired(unmatched[place]):
                verdicts[place] = Outcome.EXPIRED
        if self.request.passes and self.coalescing is not None:
            verdicts |= {place: Outcome.SUPERSEDED for place in keys if self.coalescing.is_superseded(*place)}

    def _matches(self, message: Candidate) -> bool:
        """Return whether the group's filter matches a message. Those that are only for this group were redriven."""
        policy = self.rules.filter
        return policy is None or bool(message.target) or policy.matches(decode_metadata(message.metadata))

    def _has_expired(self, message: Candidate) -> bool:
        """Return whether the claim passes a message because it has expired."""
        at = message.expires_at
        return at is not None and at <= self.now and self.request.passes and self.rules.on_expiry == "skip"

    def record_passed(self, ended: Sequence[tuple[str, int, Outcome]]) -> None:
        """Record messages that the claim has settled without a call: partition, offset and outcome of each."""
        delivery_events.record_passed(self.session, self.ref, ended, self.request.claimant.subscriber)
        if self._jobs is not None and ended:
            self._jobs.passed(ended)

    # -- taking ----------------------------------------------------------------

    def take(self, candidate: Candidate, *, retries: int = 0, suspect: bool = False) -> Claimed | Rest | None:
        """Return a delivery if this claim takes the message, with its slot if it needs one.

        Returns:
            None if it does not fit; why there is no slot for it otherwise.
        """
        key, offset, size = candidate.key, candidate.offset, candidate.size
        if not self.budget.fits(size):
            return None
        slot: Slot | None = None
        if self.slots is not None and self.slots.is_needed(key, offset):
            if self.claim.rest is not None:
                return None
            got = self.slots.take_for(key, offset)
            if isinstance(got, Rest):
                if got.key != NO_KEY:
                    return got
                self.claim.rest = got
                return None
            slot = got
        self.budget.spend(size, suspect=suspect)
        if self.coalescing is not None:
            self.coalescing.took(key, offset)
        token, by = self.request.token, self.request.claimant.subscriber
        return Claimed(self.ref, key, offset, token, retries + 1, suspect, size, self.now, by, slot)

    def store(self) -> None:
        """Write what the features have noted. The slots are locked since a message first asked for one."""
        if self.coalescing is not None:
            self.coalescing.store()
        if self.slots is not None:
            self.claim.flushed.held = self.slots.store()
