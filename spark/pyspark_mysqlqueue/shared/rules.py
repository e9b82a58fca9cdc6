# Generated from django_mysqlqueue/names/rules.py by tools/shared_modules.py.
"""The names of topics and groups, and reserved words. Nothing here depends on a setting, or on Django."""

from __future__ import annotations

import re

from pyspark_mysqlqueue.errors import InvalidMessage

NAME_LENGTH = 100
"""Maximum length of a topic or group, in characters."""
TOPIC_COLUMN_LENGTH = 120
"""Length of topic columns: it leaves room for the DLQ suffix."""
RELAY_MARK = "@"
"""What stands between topic and database in the topic of messages that are relayed. Names have no such character."""
JOB_PREFIX = "jobs."
"""What the topics of the queues of jobs begin with."""
JOB_GROUP = "jobs"
"""The consumer group of the workers of all queues of jobs."""
KEY_LENGTH = 190
"""Maximum length of a partition key, message id or subscriber name, in characters.

Three of them with a topic stay below InnoDB's 3,072 bytes for an index entry.
"""
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_LENGTH}}}")
RESERVED_PREFIX = "mysqlqueue."
REPLACES = RESERVED_PREFIX + "replaces"
"""Name in the metadata of an edited message of the id of the message that it replaces."""
REPLAYED_FROM = "replayed_from"
"""Name in the metadata of a copy that describes the original: run, topic, offset, id, published_at (epoch ms)."""


def check_name(kind: str, name: object) -> str:
    """Return a name if it is valid for a topic or group (``kind``); else raise InvalidMessage."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidMessage(f"{kind} {name!r}: must be 1 to {NAME_LENGTH} letters, digits, '.', '_' or '-'")
    return name


def job_topic(queue_name: str) -> str:
    """Return the topic of a queue of jobs."""
    return f"{JOB_PREFIX}{queue_name}"


def relayed_topic(topic: str, target: str) -> str:
    """Return the topic under which a log stores messages that are on their way to another database.

    If it does not fit its column, it is an InvalidMessage.
    """
    name = f"{topic}{RELAY_MARK}{target}"
    if len(name) > TOPIC_COLUMN_LENGTH:
        raise InvalidMessage(
            f"topic {topic!r} in database {target!r}: to be relayed, both names may have at most "
            f"{TOPIC_COLUMN_LENGTH - 1} characters together"
        )
    return name


def relay_target(topic: str) -> str | None:
    """Return the database to which the messages of a topic in the log are relayed; None if they are not."""
    return topic.partition(RELAY_MARK)[2] or None


def relayed_from(topic: str) -> str:
    """Return the topic to which a message was published, if ``topic`` is that in the log of a relay's source."""
    return topic.partition(RELAY_MARK)[0]


def check_text(kind: str, value: object) -> str:
    """Return a key or an id (``kind``) if it has at most ``KEY_LENGTH`` characters that UTF-8 can encode.

    If not, raise InvalidMessage.
    """
    if not isinstance(value, str):
        raise InvalidMessage(f"{kind} {value!r}: must be a str, not {type(value).__name__}")
    if len(value) > KEY_LENGTH:
        raise InvalidMessage(f"{kind} {value[:40]!r}…: {len(value)} characters, but at most {KEY_LENGTH} are allowed")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"{kind} {value!r}: contains a lone surrogate, which UTF-8 cannot encode") from error
    return value
