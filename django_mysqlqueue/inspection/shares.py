"""Shares of a bound: several groups or topics are read up to one number of rows together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


def read_shares(
    read: Callable[[Sequence[K], int], dict[K, list[R]]], keys: Sequence[K], most: int
) -> tuple[dict[K, list[R]], dict[K, bool]]:
    """Read about ``most`` rows in all: equal shares, and a second time what some keys leave for the others.

    Returns:
        The rows by key, and of each key whether these are all its rows.
    """
    if not keys:
        return {}, {}
    share = max(1, most // len(keys))
    limits = dict.fromkeys(keys, share)
    found = read(keys, share + 1)
    cut = [key for key, rows in found.items() if len(rows) > share]
    left = most - sum(min(len(rows), share) for rows in found.values())
    if cut and left >= len(cut):
        more = share + left // len(cut)
        found |= read(cut, more + 1)
        limits |= dict.fromkeys(cut, more)
    whole = {key: len(found.get(key, ())) <= limits[key] for key in keys}
    return {key: rows[: limits[key]] for key, rows in found.items()}, whole


def deal(wanted: Mapping[K, int], most: int) -> dict[K, int]:
    """Return shares of a number: equal ones, except that nobody gets more than is wanted."""
    shares: dict[K, int] = {}
    for place, key in enumerate(sorted(wanted, key=lambda key: wanted[key])):
        shares[key] = min(wanted[key], max(0, most - sum(shares.values())) // (len(wanted) - place))
    return shares
