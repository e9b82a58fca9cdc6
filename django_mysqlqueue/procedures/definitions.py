"""The stored procedures as SQL, for one server and the settings of this project.

Each is a file in ``procedures/sql``. Only the others call those whose names begin with ``queue__``. They follow the
protocol of ``service``: the same locks in the same order, tokens, READ COMMITTED, and the fence of the group. Where a
subscriber waits for a lock, they leave what is locked to a later call.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib import resources
from typing import Any, NamedTuple

from django_mysqlqueue.db.sizes import LATENCY_BOUNDS_MS, LATENCY_COLUMNS
from django_mysqlqueue.names.keys import PARTITION_PREFIX
from django_mysqlqueue.names.rules import KEY_LENGTH, NAME_LENGTH, REPLACES, TOPIC_COLUMN_LENGTH
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.conf import Settings
from django_mysqlqueue.options.delivery_limits import LIMIT_OPTIONS
from django_mysqlqueue.options.table import OPTIONS, storable
from django_mysqlqueue.options.validators import LONGEST_DELAY
from django_mysqlqueue.service.leasing import CLOCK_STEP_MS, MAX_PENDING
from django_mysqlqueue.service.messages import ERROR_LENGTH
from django_mysqlqueue.service.watermarks import LOOK_AHEAD
from django_mysqlqueue.sql.base import lane_partition
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.subscriptions.options import defaults
from django_mysqlqueue.version import __version__

MAX_CLAIM = 1000
"""Maximum number of messages that a call of ``queue_claim`` returns."""
PAGE = 500
"""Number of partitions that one statement looks at, and of due rows that one claim looks at."""
FIRST_PAGE = 50
"""The same for the first one, which often suffices."""
ROUNDS = 10
"""Number of times that a claim looks further in a partition, as long as it has only passed messages."""
SPARE = 10
"""Number of partitions that a claim knows in addition to the messages that it wants: some of them may be locked."""
LOOKS_AHEAD = 0.02
"""Share of the claims that look for rows that a clock, corrected since, left far in the future."""
COMMENT = "django-mysqlqueue"
SQL_MODE, CHARACTER_SET = "STRICT_TRANS_TABLES", "utf8mb4"
"""Of the session that creates the procedures. The server stores them, and they apply to all calls."""
SESSION = (f"SET NAMES {CHARACTER_SET}", f"SET SESSION sql_mode = '{SQL_MODE}'")
_PLACEHOLDER = re.compile(r"\{\{([a-z_.A-Z]+)\}\}")


class Procedure(NamedTuple):
    """A stored procedure."""

    name: str
    sql: str
    """The CREATE PROCEDURE statement."""
    comment: str
    """The comment that the server stores, with a hash of the statement."""


def procedures(settings: Settings, handlers: Iterable[Handler], *, mariadb: bool) -> list[Procedure]:
    """Return all procedures, those that others call before them.

    ``handlers``: the handlers whose options count for their groups; other groups have those of the settings.
    """
    values = _values(settings, handlers, mariadb=mariadb)
    folder = resources.files(__package__) / "sql"
    texts = {one.name.removesuffix(".sql"): one.read_text("utf-8") for one in folder.iterdir()}
    filled = {name: _fill(name, text, values) for name, text in texts.items()}
    ordered = sorted(filled, key=lambda name: (not name.startswith("queue__"), name))
    return [_procedure(name, filled[name]) for name in ordered]


def _procedure(name: str, sql: str) -> Procedure:
    # The hash is of this one alone: replacing those that clients call would take the privileges on them away.
    comment = f"{COMMENT} {hashlib.sha256(sql.encode()).hexdigest()[:16]}"
    attributes = f"MODIFIES SQL DATA SQL SECURITY DEFINER COMMENT '{comment}'"
    return Procedure(name, sql.replace("{{attributes}}", attributes), comment)


def _fill(name: str, text: str, values: Mapping[str, str]) -> str:
    """Return the statement of a file, with its placeholders filled in, and without its comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("--")]

    def value(found: re.Match[str]) -> str:
        if found[1] == "attributes":
            return found[0]
        if found[1] not in values:
            raise ValueError(f"{name}.sql: unknown placeholder {found[1]}")
        return values[found[1]]

    sql, filled = "\n".join(lines), ""
    while sql != filled:  # Values have placeholders, too.
        sql, filled = _PLACEHOLDER.sub(value, sql), sql
    return sql


def _values(settings: Settings, handlers: Iterable[Handler], *, mariadb: bool) -> dict[str, str]:
    bytewise = f"CHARACTER SET utf8mb4 COLLATE {'utf8mb4_nopad_bin' if mariadb else 'utf8mb4_0900_bin'}"
    constants = {
        "key_length": KEY_LENGTH,
        "lease_ms": round(settings.lease_duration * 1000),
        "clock_step_ms": CLOCK_STEP_MS,
        "error_length": ERROR_LENGTH,
        "look_ahead": LOOK_AHEAD,
        "max_claim": MAX_CLAIM,
        "max_pending": MAX_PENDING,
        "page": PAGE,
        "first_page": FIRST_PAGE,
        "rounds": ROUNDS,
        "spare": SPARE,
        "priority_share": settings.priority_share,
        "longest_delay": round(LONGEST_DELAY),
        "latest": 2**62,
        "looks_ahead": LOOKS_AHEAD,
        "replaces": REPLACES,
        "lanes": PARTITION_PREFIX,
        "version": __version__,
    }
    return {
        **{name: str(value) for name, value in constants.items()},
        "now": "@queue__now",
        "select_in_utc": (
            "SET STATEMENT time_zone = '+00:00' FOR SELECT"
            if mariadb
            else "SELECT /*+ SET_VAR(time_zone = '+00:00') */"
        ),
        "bytewise": bytewise,
        "group": f"VARCHAR({NAME_LENGTH}) {bytewise}",
        "topic": f"VARCHAR({TOPIC_COLUMN_LENGTH}) {bytewise}",
        "key": f"VARCHAR({KEY_LENGTH}) {bytewise}",
        "last_key": f"REPEAT(CONVERT(X'F48FBFBF' USING utf8mb4), {KEY_LENGTH + 1})",
        "begin": f"{_BEGIN}START TRANSACTION",
        "begin_reading": f"{_BEGIN}START TRANSACTION READ ONLY",
        "commit": f"COMMIT AND NO CHAIN NO RELEASE;\n{_CLOSED}",
        "on_error": _ON_ERROR,
        "alive": "h.deregistered_at = 0 AND h.heartbeat_at > {{now}} - {{lease_ms}} "
        "AND h.heartbeat_at < {{now}} + {{lease_ms}}",
        "waits": "e.acked = 0 AND e.delivery_token = 0 AND e.invisible_until > v_now "
        "AND e.delivered_at <= v_now + {{clock_step_ms}}",
        "dlq_suffix": _literal(settings.dlq_suffix),
        "code_options": _code_options(settings, handlers),
        **{
            f"option.{name}": f"COALESCE(JSON_UNQUOTE(JSON_EXTRACT(v_overrides, '$.{path}')), "
            f"JSON_UNQUOTE(JSON_EXTRACT(v_code, '$.\"{name}\"')))"
            for name, path in _OVERRIDABLE.items()
        },
        "override.filter": "JSON_UNQUOTE(JSON_EXTRACT(v_overrides, '$.filter.value'))",
        "refused_limits": ", ".join(
            f"IF(COALESCE(JSON_UNQUOTE(JSON_EXTRACT(v_overrides, '$.{name}.value')), "
            f"JSON_UNQUOTE(JSON_EXTRACT(v_limits, '$.{name}')), 'null') = 'null', NULL, '{name}')"
            for name in LIMIT_OPTIONS
            if OPTIONS[name].sql == "refused"
        ),
        "count_latency": ", ".join(
            map(_count_latency, LATENCY_COLUMNS, (None, *LATENCY_BOUNDS_MS), (*LATENCY_BOUNDS_MS, None))
        ),
        "partitions.ASC": _PARTITIONS.replace("{order}", "ASC"),
        "partitions.DESC": _PARTITIONS.replace("{order}", "DESC"),
        "publisher_key": _PUBLISHER_KEY,
    }


_BEGIN = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;\nSET @queue__open = TRUE;\n"
_CLOSED = "SET @queue__open = NULL"
_ON_ERROR = f"""DECLARE EXIT HANDLER FOR SQLEXCEPTION
  BEGIN
    ROLLBACK AND NO CHAIN NO RELEASE;
    {_CLOSED};
    RESIGNAL;
  END"""
"""A transaction of a procedure, independent of the isolation level and the ``completion_type`` of the session."""

APPLIED = tuple(name for name, option in OPTIONS.items() if option.sql == "applied" and not option.registered)
"""Options that the procedures get from the code. They read registered ones in the group's row."""
_OVERRIDABLE = {
    "max_attempts": "max_attempts.value",
    "visibility_timeout": "visibility_timeout.value",
    **{f"backoff.{field.name}": f"backoff.value.{field.name}" for field in fields(Backoff)},
}
"""Options that the procedures read, and where an override of them is."""

_PARTITIONS = """
    SELECT p.partition_key, p.last_offset > COALESCE(o.offset_claimed, p_start),
           (p_mode = 'shared' OR h.subscriber_name IS NULL OR h.subscriber_name = p_me)
             AND NOT (p_mode = 'ordered' AND EXISTS (
               SELECT 1 FROM queue_delivery_state e FORCE INDEX (PRIMARY)
               WHERE e.consumer_group = p_group AND e.topic = p_topic AND e.partition_key = p.partition_key
                 AND e.acked = 0 AND (p_strict OR ({{waits}} AND e.delivered_by <> ''))
             )),
           o.offset_claimed IS NULL OR (p_mode = 'ordered' AND l.leased_by IS NULL)
    FROM (
      SELECT partition_key, MAX(`offset`) AS last_offset FROM queue_messages FORCE INDEX (queue_messages_partition)
      WHERE topic = p_topic AND partition_key >= p_from AND partition_key < p_to
      GROUP BY partition_key ORDER BY partition_key {order} LIMIT v_page
    ) p
    LEFT JOIN queue_offsets o FORCE INDEX (PRIMARY)
      ON o.consumer_group = p_group AND o.topic = p_topic AND o.partition_key = p.partition_key
    LEFT JOIN queue_partition_leases l FORCE INDEX (PRIMARY)
      ON l.consumer_group = p_group AND l.topic = p_topic AND l.partition_key = p.partition_key
    LEFT JOIN queue_subscriber_heartbeats h FORCE INDEX (PRIMARY)
      ON h.consumer_group = p_group AND h.topic = p_topic AND h.subscriber_name = l.leased_by AND {{alive}}
    ORDER BY p.partition_key {order}"""
"""The next partitions of a topic: their keys, whether they have messages above the position, whether another consumer
owns them, and whether a row is missing that a claim needs."""

_PARTITION = lane_partition("m.partition_key")
_PUBLISHER_KEY = (
    f"COALESCE(m.publisher_key, "
    f"IF(LEFT({_PARTITION}, {len(PARTITION_PREFIX)}) = '{PARTITION_PREFIX}', NULL, {_PARTITION}))"
)
"""The publisher's key (``messages.publisher_key``)."""


def _literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def _count_latency(name: str, above: int | None, upto: int | None) -> str:
    condition = "p_outcome = 'acked'"
    if above is not None:
        condition += f" AND p_latency > {above}"
    if upto is not None:
        condition += f" AND p_latency <= {upto}"
    return f"{name} = {name} + IF({condition}, p_number, 0)"


def _code_options(settings: Settings, handlers: Iterable[Handler]) -> str:
    """Return an expression for the options that the code has for ``p_group`` and ``p_topic``, as JSON text."""
    cases = [
        f"WHEN p_group = {_literal(one.ref.group)} AND p_topic = {_literal(one.ref.topic)} THEN "
        f"{_literal(_as_json(settings, one.ref.group, {name: getattr(one, name) for name in APPLIED}))}"
        for one in sorted(handlers, key=lambda one: one.ref)
    ]
    cases += [
        f"WHEN p_group = {_literal(group)} THEN "
        f"{_literal(_as_json(settings, group, {**defaults(settings), **settings.groups.get(group, {})}))}"
        for group in sorted({*settings.recorded, *settings.groups})
    ]
    default = _literal(_as_json(settings, "", defaults(settings)))
    return f"CASE {' '.join(cases)} ELSE {default} END" if cases else default


def _as_json(settings: Settings, group: str, options: Mapping[str, Any]) -> str:
    values = {name: storable(options[name]) for name in APPLIED}
    values |= {f"backoff.{name}": value for name, value in values.pop("backoff").items()}
    return json.dumps({**values, "record": settings.recorded_of(group)}, sort_keys=True)
