"""What the modes of a group answer: the only part of the work for it in which they differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

from django_mysqlqueue.runtime.polling.parts import Parts
from django_mysqlqueue.service.claims import Claim, Due, Want
from django_mysqlqueue.service.deliveries import Claimed, Flushed, Settlement


class Mode(ABC):
    """Ordered or shared. As a context manager, it prepares a turn, and ends one that has not failed.

    What only one of the two modes has to do is nothing in the other.
    """

    def __init__(self, parts: Parts) -> None:
        self._context, self._configuration, self._memory, self._limited, self._health = parts
        self._inbox = parts.context.inbox
        self.ref = parts.configuration.ref

    @abstractmethod
    def __enter__(self) -> None:
        """Prepare a turn."""

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:  # noqa: B027
        """End a turn."""

    # -- what is known --------------------------------------------------------

    def configured(self) -> None:  # noqa: B027
        """Note that the group's options may have changed."""

    @abstractmethod
    def notify(self, keys: Iterable[str]) -> None:
        """Note that partitions of the subset have, or may have, unclaimed messages."""

    @abstractmethod
    def next_at(self) -> int | None:
        """Return when the next redelivery is due, in epoch milliseconds, or None."""

    def wake_at(self) -> float:
        """Return when the mode needs a turn even if nothing happens, by the monotonic clock."""
        return float("inf")

    def wants_turn(self) -> bool:
        """Return whether the mode has something to do at once, apart from claiming and writing."""
        return False

    def is_idle(self) -> bool:
        """Return whether the mode knows of no work, apart from the partitions to look at."""
        return True

    @abstractmethod
    def reset(self) -> None:
        """Forget every hint. Leases and claimed deliveries stay."""

    def restore(self, owned: Collection[str], held: Sequence[Claimed]) -> None:  # noqa: B027
        """Begin again with the partitions that this process owns, and the deliveries that are not written."""

    def owned(self) -> list[str]:
        """Return the partitions that this process owns, as far as it knows."""
        return []

    def release_free(self) -> None:  # noqa: B027
        """Release all partitions of which nothing is in flight."""

    # -- what to claim --------------------------------------------------------

    @abstractmethod
    def resume(self) -> None:
        """Ask again for what waited for the end of a suspected poison message, or for a slot."""

    @abstractmethod
    def want(self, key: str, limit: int) -> Want | None:
        """Return what to take from a partition now. If there is nothing, remove it from ``todo`` and return None."""

    def is_free(self, key: str) -> bool:
        """Return whether a message of a partition could start soon."""
        return True

    def looks_for_due(self) -> bool:
        """Return whether claims look for redeliveries, of any partition and priority, now."""
        return False

    def redeliveries(self, most: int, with_slots: int) -> Due | None:
        """Return how a claim looks for redeliveries: at most ``most``, ``with_slots`` of them with slots."""
        return None

    # -- what has come of it --------------------------------------------------

    @abstractmethod
    def settled(self, settlements: Sequence[Settlement], flushed: Flushed) -> None:
        """Remember what a flush has written."""

    @abstractmethod
    def claimed(self, claim: Claim, wants: Sequence[Want], max_due: int) -> bool:
        """Remember what a claim found, and return whether to poll soon."""
