"""System checks of the queue's settings, handlers, routers and database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections, router
from django.utils.module_loading import import_string

from django_mysqlqueue import conf
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.humanize import shortened
from django_mysqlqueue.inspection import list_options
from django_mysqlqueue.models import (
    ArchiveSegment,
    CoalesceKey,
    CollectedTopic,
    ConsumerGroup,
    ConsumerOffset,
    DebouncedMessage,
    DeliveryEvent,
    DeliveryState,
    Operation,
    OutboxMessage,
    PartitionLease,
    QueueMessage,
    RelayPosition,
    RelayWatermark,
    Rollup,
    Sequencer,
    Slots,
    SubscriberHeartbeat,
)
from django_mysqlqueue.procedures import installing
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql import dialect_of
from django_mysqlqueue.sql.connection import is_server, server_version
from django_mysqlqueue.subscriptions import registry
from django_mysqlqueue.subscriptions.effective import GroupOption

MODELS = (
    QueueMessage,
    OutboxMessage,
    Sequencer,
    ConsumerGroup,
    DeliveryState,
    PartitionLease,
    ConsumerOffset,
    Slots,
    CoalesceKey,
    DebouncedMessage,
    SubscriberHeartbeat,
    DeliveryEvent,
    Operation,
    Rollup,
    CollectedTopic,
    RelayPosition,
    RelayWatermark,
    ArchiveSegment,
)
MINIMUM = {"mariadb": (10, 11), "mysql": (8, 0, 19), "sqlite": (3, 35)}
"""The oldest server versions that support all SQL of the queue, by dialect.

MySQL has the collation of the queue's columns, ``utf8mb4_0900_bin``, since 8.0.17, and the row alias of Django's
upserts since 8.0.19. ``tests/sql/test_mysql_syntax.py`` searches the statements for newer SQL.
"""
TESTED = {"mysql": (8, 4)}
"""Versions from ``MINIMUM`` to below these are accepted with a warning, since no test runs on them."""


@checks.register("django_mysqlqueue")
def check_settings(**kwargs: Any) -> list[checks.CheckMessage]:
    """Check that the ``MYSQLQUEUE`` setting is valid (E001 to E006)."""
    return [
        checks.Error(problem.message, hint=problem.hint or None, id=f"django_mysqlqueue.{problem.id}")
        for problem in conf.problems()
    ]


@checks.register("django_mysqlqueue")
def check_settings_name(**kwargs: Any) -> list[checks.CheckMessage]:
    """Warn about settings whose names resemble ``MYSQLQUEUE`` (W013)."""
    return [
        checks.Warning(
            f"The setting {name} has no effect.",
            hint="The queue reads the dict MYSQLQUEUE.",
            id="django_mysqlqueue.W013",
        )
        for name in dir(django_settings)
        if name.isupper() and name != "MYSQLQUEUE" and name.replace("_", "").removeprefix("DJANGO") == "MYSQLQUEUE"
    ]


@checks.register("django_mysqlqueue")
def check_redact(**kwargs: Any) -> list[checks.CheckMessage]:
    """Check that ``REDACT`` can be imported and called (E016); otherwise pages that show payloads would fail."""
    if conf.problems():
        return []  # reported by E001 to E006
    path = conf.get_settings().redact
    if not isinstance(path, str):
        return []
    hint = "Use a function that takes (text, topic, kind) and returns a string, for example 'shop.privacy.redact'."
    try:
        found = import_string(path)
    except ImportError as error:
        message = f"MYSQLQUEUE['REDACT'] = {path!r} cannot be imported: {error}"
        return [checks.Error(message, hint=hint, id="django_mysqlqueue.E016")]
    if callable(found):
        return []
    message = f"MYSQLQUEUE['REDACT'] = {path!r} names an object of type {type(found).__name__}, not a function."
    return [checks.Error(message, hint=hint, id="django_mysqlqueue.E016")]


@checks.register("django_mysqlqueue")
def check_router(**kwargs: Any) -> list[checks.CheckMessage]:
    """Check that all of the queue's tables are in one database (E007)."""
    aliases = {router.db_for_write(model) for model in MODELS}
    if len(aliases) == 1:
        return []
    return [
        checks.Error(
            f"The database routers split the queue's tables between the databases {', '.join(sorted(aliases))}.",
            hint="Route all models of the app django_mysqlqueue to one database: the queue changes several tables per "
            "transaction.",
            id="django_mysqlqueue.E007",
        )
    ]


@checks.register("django_mysqlqueue")
def check_migrating(**kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if ``migrate`` would not create all of the queue's tables in the queue's database (W014)."""
    alias = _alias()
    if alias is None:
        return []
    kept_out = [model._meta.db_table for model in MODELS if not router.allow_migrate_model(alias, model)]
    if not kept_out:
        return []
    return [
        checks.Warning(
            f"The queue is in database {alias!r}, but the routers' allow_migrate does not allow these tables there: "
            f"{', '.join(kept_out)}.",
            hint=f"Let allow_migrate({alias!r}, 'django_mysqlqueue') return True or None, "
            "unless another project migrates that database.",
            id="django_mysqlqueue.W014",
        )
    ]


@checks.register("django_mysqlqueue")
def check_atomic_handlers(**kwargs: Any) -> list[checks.CheckMessage]:
    """Warn about atomic handlers if no other model is written to the queue's database (W015)."""
    alias = _alias()
    if alias is None or conf.problems():
        return []
    others = [model for model in apps.get_models() if model._meta.app_label != QueueMessage._meta.app_label]
    if not others or any(router.db_for_write(model) == alias for model in others):
        return []
    try:
        atomic = [handler.where for handler in registry.handlers().values() if handler.atomic]
    except SubscriberError:
        return []  # reported by E008
    if not atomic:
        return []
    return [
        checks.Warning(
            f"Handlers with atomic=True: {', '.join(sorted(atomic))}. Their transaction is on the queue's database "
            f"{alias!r}, but no other model of the project is written there.",
            hint="Writes to other databases are not part of that transaction and can happen more than once. Make them "
            "idempotent (by delivery.id), or move the queue to the database of the handlers' tables.",
            id="django_mysqlqueue.W015",
        )
    ]


@checks.register("django_mysqlqueue")
def check_handlers(**kwargs: Any) -> list[checks.CheckMessage]:
    """Check that handlers are declared correctly and once (E008); warn about ``GROUPS`` without effect (W009)."""
    if conf.problems():
        return []  # reported by E001 to E006
    try:
        handlers = registry.subscriptions().values()
    except SubscriberError as error:
        return [checks.Error(str(error), id="django_mysqlqueue.E008")]
    groups = {handler.ref.group for handler in handlers}
    in_batches = {handler.ref.group for handler in handlers if handler.batch}
    found: list[checks.CheckMessage] = []
    for name, options in conf.get_settings().groups.items():
        if name not in groups:
            text = f"MYSQLQUEUE['GROUPS'] names {name!r}, but no handler has this group."
            hint = f"Groups with handlers: {', '.join(sorted(groups)) or 'none'}."
        elif "batch_size" in options and name not in in_batches:
            text = (
                f"MYSQLQUEUE['GROUPS'][{name!r}]['BATCH_SIZE'] has no effect: no handler of the group has batch=True."
            )
            hint = "Remove it, or declare the handler with batch=True. CLAIM_SIZE is the number of messages per claim."
        else:
            continue
        found.append(checks.Warning(text, hint=hint, id="django_mysqlqueue.W009"))
    return found


@checks.register("django_mysqlqueue", deploy=True)
def check_eager(**kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if ``EAGER`` is on in a deployment (W012)."""
    if conf.problems() or not conf.get_settings().eager:
        return []
    return [
        checks.Warning(
            "MYSQLQUEUE['EAGER'] is True: publishers run the handlers themselves.",
            hint="EAGER is for tests and development. Remove it and run manage.py runsubscriber.",
            id="django_mysqlqueue.W012",
        )
    ]


@checks.register("django_mysqlqueue")
def check_sqlite_options(**kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if the SQLite database lacks options that the queue needs (W010)."""
    alias = _alias()
    if alias is None or is_server(connections[alias]):
        return []
    options = connections[alias].settings_dict.get("OPTIONS", {})
    wanted = []
    if options.get("transaction_mode") != "IMMEDIATE":
        wanted.append("'transaction_mode': 'IMMEDIATE'")
    if options.get("timeout", 5) < 20:
        wanted.append("'timeout': 30")
    pragmas = str(options.get("init_command", "")).lower().replace(" ", "")
    if "journal_mode=wal" not in pragmas or "synchronous=normal" not in pragmas:
        wanted.append("'init_command': 'PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;'")
    if not wanted:
        return []
    return [
        checks.Warning(
            f"The queue's SQLite database {alias!r} lacks options: with more than one process, statements may fail "
            "with “database is locked”.",
            hint=f"Add to its entry in DATABASES: 'OPTIONS': {{{', '.join(wanted)}}}.",
            id="django_mysqlqueue.W010",
        )
    ]


@checks.register(checks.Tags.database)
def check_database(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check that the server can run the queue (E011), in ``check --database`` and ``migrate``."""
    alias = _alias()
    if alias is None or alias not in (databases or ()):
        return []
    with sessions.sound(alias):  # a setting that E017 reports must not affect these queries
        return [checks.Error(problem, id="django_mysqlqueue.E011") for problem in server_problems(alias)]


@checks.register(checks.Tags.database)
def check_tested_version(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if the queue is not tested on the server's version (W018)."""
    alias = _alias()
    if alias is None or alias not in (databases or ()):
        return []
    with sessions.sound(alias):  # a setting that E017 reports must not affect these queries
        connection = connections[alias]
        try:
            name = dialect_of(connection).name
        except ImproperlyConfigured:
            return []  # reported by E011
        version = server_version(connection)
    if name not in TESTED or _is_below(version, MINIMUM[name]) or not _is_below(version, TESTED[name]):
        return []
    return [
        checks.Warning(
            f"The queue's database {alias!r} runs {name} {_dotted(version)}, on which django_mysqlqueue is not tested.",
            hint=f"Tests run on {_dotted(TESTED[name])} and later. The queue uses only SQL that "
            f"{_dotted(MINIMUM[name])} supports, but run your project's tests on this version.",
            id="django_mysqlqueue.W018",
        )
    ]


@checks.register(checks.Tags.database)
def check_sessions(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check the session variables of the project's connections to the queue's database (E017).

    Subscribers and the queue's commands set these variables on their own connections; web processes do not.
    """
    alias = _alias()
    if alias is None or alias not in (databases or ()):
        return []
    connection = connections[alias]
    try:
        faults = dialect_of(connection).session_faults(connection)
    except ImproperlyConfigured:
        return []  # reported by E011
    return [
        checks.Error(
            f"Connections to the queue's database {alias!r} have {one.name} = {value}: {one.effect}.",
            hint=f"Set {one.name} = {one.value} on the server, or for the connections of this project: "
            f"DATABASES[{alias!r}]['OPTIONS']['init_command'] = \"SET {one.name} = {one.value}\".",
            id="django_mysqlqueue.E017",
        )
        for one, value in faults
    ]


def _alias() -> str | None:
    try:
        alias = conf.get_settings().database or router.db_for_write(OutboxMessage) or DEFAULT_DB_ALIAS
    except ImproperlyConfigured:
        return None  # reported by E001 to E006
    return alias if alias in connections else None


@checks.register(checks.Tags.database)
def check_overrides(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn about overrides that the code does not know: subscribers ignore them, or refuse a filter (W019)."""
    return [
        checks.Warning(
            f"{one.name} of the group {ref.group!r} on topic {ref.topic!r} is overridden with "
            f"{shortened(one.override.text)}, but subscribers "
            f"{'claim nothing because of it' if one.refused else 'ignore that'}: {one.ignored}.",
            hint=f"Remove it: manage.py queueset {ref.group} {ref.topic} --unset {one.name}",
            id="django_mysqlqueue.W019",
        )
        for ref, options in _options_of_groups(databases)
        for one in options
        if one.override is not None and one.ignored
    ]


@checks.register(checks.Tags.database)
def check_registered(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn about registered options that differ from those of the code (W020)."""
    return [
        checks.Warning(
            f"{one.name} of the group {ref.group!r} on topic {ref.topic!r} is {one.code_text} in the code, but "
            f"{one.registered_text} is registered.",
            hint="Subscribers ignore the limits, filter and allowed users of the code until migrate registers them.",
            id="django_mysqlqueue.W020",
        )
        for ref, options in _options_of_groups(databases)
        for one in options
        if one.source and one.registered_text
    ]


@checks.register(checks.Tags.database)
def check_procedures(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn about stored procedures of another release or for other settings, and about missing ones (W021)."""
    alias = _alias()
    if alias is None or alias not in (databases or ()) or conf.problems() or not is_server(connections[alias]):
        return []
    try:
        with sessions.sound(alias):
            state = installing.state(alias)
    except (SubscriberError, DatabaseError):
        return []  # E008 reports it; or the server cannot be reached
    if state.is_current or not (state.is_installed or conf.get_settings().sql_topics):
        return []
    text = "The stored procedures for clients in plain SQL are those of another release, or for other settings."
    if not state.is_installed:
        text = "MYSQLQUEUE['GROUPS'] has SQL_TOPICS, but the stored procedures for clients in plain SQL are missing."
    return [checks.Warning(text, hint="Run manage.py queueprocedures.", id="django_mysqlqueue.W021")]


def _options_of_groups(databases: Sequence[str] | None) -> Iterable[tuple[GroupRef, Sequence[GroupOption]]]:
    """Return the options of the registered groups; nothing if they cannot be read, which other checks report."""
    alias = _alias()
    if alias is None or alias not in (databases or ()) or conf.problems():
        return []
    try:
        with sessions.sound(alias):  # a setting that E017 reports must not affect this query
            return list_options(using=alias).items()
    except (SubscriberError, DatabaseError):
        return []  # E008 reports it; or the tables are not there yet


def server_problems(alias: str) -> Iterator[str]:
    """Yield the reasons why a database server cannot run the queue. Subscribers check this, too, before they start.

    Args:
        alias: alias of the queue's database.
    """
    connection = connections[alias]
    try:
        dialect = dialect_of(connection)
    except ImproperlyConfigured as error:
        yield str(error)
        return
    version = server_version(connection)
    minimum = MINIMUM[dialect.name]
    if _is_below(version, minimum):
        yield (
            f"The queue's database {alias!r} runs {dialect.name} {_dotted(version)}; "
            f"{_dotted(minimum)} or later is required."
        )
    if not is_server(connection):
        return
    with connection.cursor() as cursor:
        cursor.execute("SHOW VARIABLES WHERE Variable_name IN ('wsrep_on', 'binlog_format', 'log_bin')")
        variables = {name.lower(): str(value).upper() for name, value in cursor.fetchall()}
        if variables.get("wsrep_on") == "ON":
            yield f"The queue's database {alias!r} is a Galera node: the sequencer's lock would be local to the node."
        if variables.get("binlog_format") == "STATEMENT" and variables.get("log_bin") == "ON":
            yield f"The queue's database {alias!r} has binlog_format=STATEMENT: READ COMMITTED requires ROW or MIXED."
        names = [model._meta.db_table for model in MODELS]
        cursor.execute(
            "SELECT table_name, engine FROM information_schema.tables "
            f"WHERE table_schema = DATABASE() AND table_name IN ({', '.join(['%s'] * len(names))})",
            names,
        )
        for name, engine in cursor.fetchall():
            if str(engine).upper() != "INNODB":
                yield f"Table {name} in database {alias!r} uses {engine}: the queue requires InnoDB."


def _is_below(version: tuple[int, ...], minimum: tuple[int, ...]) -> bool:
    return version[: len(minimum)] < minimum


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
