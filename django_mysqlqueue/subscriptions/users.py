"""The check whether this process's database user may use a consumer group."""

from __future__ import annotations

from django_mysqlqueue.options.allowed_users import is_allowed
from django_mysqlqueue.service.groups import OptionColumns
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.options import allowed_users_of


def user_refusal(session: Session, ref: GroupRef, columns: OptionColumns) -> str:
    """Return why the session's user may not use a group, or an empty string.

    Only for groups that have allowed users, this asks the server who the user is. SQLite has no users.

    Raises:
        ValueError: this release cannot parse the group's allowed users.
    """
    patterns = allowed_users_of(columns)
    if patterns is None or session.dialect.current_user is None:
        return ""
    row = session.row(f"SELECT {session.dialect.current_user}")
    user = "" if row is None else str(row[0])
    if is_allowed(patterns, user):
        return ""
    return (
        f"The group {ref.group!r} on {ref.topic!r} is for the database users {', '.join(patterns)}, and this one is "
        f"{user}. To change that: manage.py queueset {ref.group} {ref.topic} allowed_users=…"
    )
