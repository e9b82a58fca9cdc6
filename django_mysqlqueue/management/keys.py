"""What the keys of ``queuestatus --watch`` do: from a view and a key to the next view, without a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from django_mysqlqueue.service.refs import GroupRef

HELP = {
    "j, down": "choose the next group",
    "k, up": "choose the previous group",
    "Enter": "open the chosen group",
    "p": "pause or resume the chosen group: asks for a reason and a confirmation",
    "/": "filter the groups by a text in group/topic",
    "Esc": "go back; in the list, clear the filter",
    "h, ?": "show the keys",
    "q, Ctrl+C": "quit",
}
"""What the keys do, by name."""
FILTER_LENGTH = 60

_KEY = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_NAMES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "k": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "j": "down",
    "\r": "enter",
    "\n": "enter",
    "\x1b": "escape",
    "\x7f": "backspace",
    "\b": "backspace",
    "?": "h",
}


class Place(NamedTuple):
    """A group of one of the databases."""

    alias: str
    ref: GroupRef


@dataclass(frozen=True, slots=True)
class View:
    """What the screen shows, and what the keys have asked for."""

    mode: Literal["groups", "group", "filter", "help", "end"] = "groups"
    """The list of groups, the chosen one, the list while the filter is typed, the keys, or nothing any more."""
    chosen: Place | None = None
    filter: str = ""
    is_asked: bool = False
    """Whether to pause or resume the chosen group."""


START = View()


def split(data: str) -> list[str]:
    """Return the keys in what a terminal has sent. An escape sequence is one key."""
    return _KEY.findall(data)


def press(view: View, key: str, places: Sequence[Place]) -> View:
    """Return the view after a key.

    Args:
        view: the view before.
        key: the key, as the terminal sends it.
        places: the groups that the list shows, in its order.
    """
    letter = key.lower() if len(key) == 1 else key
    name = _NAMES.get(letter, letter)
    if view.mode == "filter":
        return _type(view, key, name)
    if name == "q":
        return replace(view, mode="end")
    if view.mode == "help" or name == "h":
        return replace(view, mode="groups" if view.mode == "help" else "help")
    if name == "/":
        return replace(view, mode="filter")
    if name == "escape":
        return replace(view, mode="groups", filter=view.filter if view.mode == "group" else "")
    number = places.index(view.chosen) if view.chosen in places else None
    if name in ("up", "down") and places:
        step = 1 if name == "down" else -1
        following = 0 if number is None else min(max(number + step, 0), len(places) - 1)
        return replace(view, chosen=places[following])
    if name in ("enter", "p") and number is not None:
        return replace(view, mode="group") if name == "enter" else replace(view, is_asked=True)
    return view


def _type(view: View, key: str, name: str) -> View:
    if name in ("enter", "escape"):
        return replace(view, mode="groups", filter=view.filter if name == "enter" else "")
    if name == "backspace":
        return replace(view, filter=view.filter[:-1])
    if len(key) == 1 and key.isprintable():
        return replace(view, filter=f"{view.filter}{key}"[:FILTER_LENGTH])
    return view
