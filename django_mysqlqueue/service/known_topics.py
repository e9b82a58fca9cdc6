"""``STRICT_TOPICS``: the topics that this project names in ``TOPICS`` or by a handler."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from django_mysqlqueue.exceptions import KnownNames, UnknownTopic
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.topics import is_dlq
from django_mysqlqueue.text.humanize import close_names, did_you_mean, listed

SHOWN = 10
"""Maximum number of topics that an error lists."""

discover: Callable[[], None] | None = None
"""A function that imports the modules that declare handlers, set by the app."""

_handled: set[str] = set()


def declare(topic: str) -> None:
    """Note that this project has a handler for a topic."""
    _handled.add(topic)


def require(topic: str) -> None:
    """Check a topic before a message is published to it.

    Handlers are discovered only if the topic is not known yet, and again for each such topic: that is cheap if the
    modules are imported, and waits if another thread is importing them.
    """
    settings = get_settings()
    if settings.topics.declares(topic) or topic in _handled:
        return
    if discover is not None:
        discover()
    if topic in _handled:
        return
    known = {name: name for name in sorted({*settings.topics.names(), *_handled}) if not is_dlq(name)}
    raise UnknownTopic(
        f"topic {topic!r}: STRICT_TOPICS is on, and neither MYSQLQUEUE['TOPICS'] nor a handler of this project "
        "names it.",
        known=KnownNames(known, partial(_meant_or_known, topic)),
    )


def _meant_or_known(topic: str, known: Collection[str]) -> str:
    """Return the end of the error: a similar topic, else those that are known."""
    hint = did_you_mean(repr(one) for one in close_names(topic, known, most=1))
    return hint or f"Known: {listed(list(known), most=SHOWN)}."
