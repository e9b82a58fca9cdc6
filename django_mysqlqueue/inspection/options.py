"""The options that the subscribers of consumer groups use."""

from __future__ import annotations

from collections.abc import Mapping

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.service import groups
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.groups import OptionColumns
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.effective import GroupOption, effective_options
from django_mysqlqueue.subscriptions.options import filter_of
from django_mysqlqueue.subscriptions.registry import subscriptions


@checked()
def list_options(
    *, group: str | None = None, topic: str | None = None, using: str | None = None
) -> Mapping[GroupRef, tuple[GroupOption, ...]]:
    """Return the options of registered consumer groups that operators can override, in order of topic and group.

    Options come from the code of this process; of a group without a handler here, only overrides are known.

    Args:
        group: only this consumer group, on each of its topics.
        topic: only the consumer groups on this topic.
        using: alias of the database (default: the topic's ``DATABASE`` in ``TOPICS``, else ``MYSQLQUEUE["DATABASE"]``,
            else the router's choice).

    Raises:
        InvalidMessage: ``using`` is not an alias in ``DATABASES``.
        SubscriberError: this project declares two handlers for a group.
        django.db.Error: the database refuses or does not answer.
    """
    session = Session(queue_alias(using, topic=topic))
    refs = [
        ref
        for ref in groups.registered_refs(session.using)
        if group in (None, ref.group) and topic in (None, ref.topic)
    ]
    controls = groups.group_controls(session, refs)
    known = subscriptions()
    return {ref: tuple(effective_options(ref, controls[ref].options, known)) for ref in refs if ref in controls}


def read_filter(columns: OptionColumns) -> FilterPolicy | str | None:
    """Return the filter that applies to a group: None if it has none; a text, the error, if it cannot be parsed."""
    try:
        return filter_of(columns)
    except ValueError as error:
        return str(error)
