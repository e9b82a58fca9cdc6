"""System checks of the queue's settings, handlers, routers and database."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections, router
from django.utils.module_loading import import_string

from django_mysqlqueue import inspection
from django_mysqlqueue.db.tables import GROUPS, SEQUENCER
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.models import MODELS, QueueMessage
from django_mysqlqueue.options import conf
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.service import bell
from django_mysqlqueue.service.databases import queue_alias, queue_aliases, same_databases
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.sequencing import log_id
from django_mysqlqueue.sql import dialect_of, failures
from django_mysqlqueue.sql.connection import bounded, is_server, server_version
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions import registry
from django_mysqlqueue.text.humanize import shortened

MINIMUM = {"mariadb": (10, 11), "mysql": (8, 0, 19), "sqlite": (3, 35)}
"""The oldest server versions that support all SQL of the queue, by dialect.

MySQL has the collation of the queue's columns, ``utf8mb4_0900_bin``, since 8.0.17, and the row alias of Django's
upserts since 8.0.19. ``tests/sql/test_mysql_syntax.py`` searches the statements for newer SQL.
"""
READ = 2.0
"""Seconds to wait for each answer of a database that is only compared with the others."""
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
def check_bell(**kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if publishers cannot wake the subscribers of this host (W032)."""
    if conf.problems() or (settings := conf.get_settings().bell) is None:
        return []
    try:
        bell.require_usable(settings)
    except bell.Unavailable as error:
        return [
            checks.Warning(
                f"Publishers cannot wake the subscribers of this host: {error}",
                hint="Correct MYSQLQUEUE['BELL'], or set it to None.",
                id="django_mysqlqueue.W032",
            )
        ]
    return []


@checks.register("django_mysqlqueue")
def check_databases(**kwargs: Any) -> list[checks.CheckMessage]:
    """Check that no two aliases in ``TOPICS`` lead to one database (E024): workers would take each other's leases."""
    if conf.problems() or (same := same_databases()) is None:
        return []  # E001 to E006 report invalid settings.
    return [
        checks.Error(
            f"The databases {same[0]!r} and {same[1]!r} of the queue are the same one.",
            hint="Name each database by one alias in MYSQLQUEUE.",
            id="django_mysqlqueue.E024",
        )
    ]


@checks.register(checks.Tags.database)
def check_logs(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check that none of the databases has the log of another one of the queue (E024), by the ids of the logs."""
    chosen = _chosen(databases)
    if not chosen or len(_aliases()) == 1 or conf.problems() or same_databases() is not None:
        return []  # Others report it.
    seen: dict[str, str] = {}
    found: list[checks.CheckMessage] = []
    for alias in _aliases():
        log = _log_of(alias)
        other = seen.setdefault(log, alias) if log else alias
        if other != alias and not {other, alias}.isdisjoint(chosen):
            hint = same_log_hint(log)
            found.append(checks.Error(same_log_text(other, alias), hint=hint, id="django_mysqlqueue.E024"))
    return found


def _log_of(alias: str) -> str:
    """Return the id of a database's log; empty if it cannot be read: the tables may not be there yet."""
    try:
        # Not only those that were chosen: ``migrate`` works on one at a time.
        with bounded(alias, read=READ, connect=READ), sessions.sound(alias):
            return log_id(Session(alias))
    except Exception:  # noqa: BLE001  # An outage is reported by others; a test may not allow the connection.
        return ""


def same_log_text(one: str, other: str) -> str:
    """Return that two aliases of the queue lead to the same log."""
    return (
        f"The databases {one!r} and {other!r} of the queue have the same log: they are one database, or one of them is "
        "a copy of the other."
    )


def same_log_hint(log: str) -> str:
    """Return what to do about it."""
    return (
        "Name each database by one alias in MYSQLQUEUE. If one is a copy, give its log an id of its own: "
        f"UPDATE {SEQUENCER} SET log_id = '{uuid.uuid4()}' WHERE log_id = '{log}'"
    )


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
    """Warn if ``migrate`` would not create all of the queue's tables in each of its databases (W014)."""
    kept_out = {
        alias: [model._meta.db_table for model in MODELS if not router.allow_migrate_model(alias, model)]
        for alias in _aliases()
    }
    return [
        checks.Warning(
            f"The queue is in database {alias!r}, but the routers' allow_migrate does not allow these tables there: "
            f"{', '.join(tables)}.",
            hint=f"Let allow_migrate({alias!r}, 'django_mysqlqueue') return True or None, "
            "unless another project migrates that database.",
            id="django_mysqlqueue.W014",
        )
        for alias, tables in kept_out.items()
        if tables
    ]


@checks.register("django_mysqlqueue")
def check_atomic_handlers(**kwargs: Any) -> list[checks.CheckMessage]:
    """Warn about atomic handlers if no other model is written to the database of their topic (W015)."""
    aliases = _aliases()
    if not aliases or conf.problems():
        return []
    others = [model for model in apps.get_models() if model._meta.app_label != QueueMessage._meta.app_label]
    written = {router.db_for_write(model) for model in others}
    if not others or written.issuperset(aliases):
        return []
    atomic: dict[str, list[str]] = {}
    try:
        for handler in registry.handlers().values():
            if handler.atomic:
                atomic.setdefault(queue_alias(topic=handler.ref.topic), []).append(handler.where)
    except SubscriberError:
        return []  # reported by E008
    return [
        checks.Warning(
            f"Handlers with atomic=True: {', '.join(sorted(places))}. Their transaction is on the queue's database "
            f"{alias!r}, but no other model of the project is written there.",
            hint="Writes to other databases are not part of that transaction and can happen more than once. Make them "
            "idempotent (by delivery.id), or move the queue to the database of the handlers' tables.",
            id="django_mysqlqueue.W015",
        )
        for alias, places in atomic.items()
        if alias in aliases and alias not in written
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


@checks.register("django_mysqlqueue", deploy=True)
def check_run_in_server(**kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if ``RUN_IN_SERVER`` is on in a deployment (W033)."""
    if conf.problems() or not conf.get_settings().run_in_server:
        return []
    return [
        checks.Warning(
            "MYSQLQUEUE['RUN_IN_SERVER'] is True: it is for runserver with DEBUG = True, and ignored otherwise.",
            hint="Remove it, and run manage.py runsubscriber, or use the hooks in django_mysqlqueue.contrib.",
            id="django_mysqlqueue.W033",
        )
    ]


@checks.register("django_mysqlqueue")
def check_sqlite_options(**kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if an SQLite database lacks options that the queue needs (W010)."""
    wanted = {alias: _missing_options(alias) for alias in _aliases() if connections[alias].vendor == "sqlite"}
    return [
        checks.Warning(
            f"The queue's SQLite database {alias!r} lacks options: with more than one process, statements may fail "
            "with “database is locked”.",
            hint=f"Add to its entry in DATABASES: 'OPTIONS': {{{', '.join(options)}}}.",
            id="django_mysqlqueue.W010",
        )
        for alias, options in wanted.items()
        if options
    ]


def _missing_options(alias: str) -> list[str]:
    options = connections[alias].settings_dict.get("OPTIONS", {})
    wanted = []
    if options.get("transaction_mode") != "IMMEDIATE":
        wanted.append("'transaction_mode': 'IMMEDIATE'")
    if options.get("timeout", 5) < 20:
        wanted.append("'timeout': 30")
    pragmas = str(options.get("init_command", "")).lower().replace(" ", "")
    if "journal_mode=wal" not in pragmas or "synchronous=normal" not in pragmas:
        wanted.append("'init_command': 'PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;'")
    return wanted


@checks.register(checks.Tags.database)
def check_database(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check that the servers can run the queue (E011), in ``check --database`` and ``migrate``."""
    found: list[checks.CheckMessage] = []
    for alias in _chosen(databases):
        with sessions.sound(alias):  # a setting that E017 reports must not affect these queries
            found += [checks.Error(problem, id="django_mysqlqueue.E011") for problem in server_problems(alias)]
    return found


@checks.register(checks.Tags.database)
def check_default_engine(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if the project's own tables beside the queue would not be transactional (W030)."""
    engines = {alias: _default_engine(alias) for alias in _chosen(databases) if is_server(connections[alias])}
    return [
        checks.Warning(
            f"The server of the queue's database {alias!r} creates tables with {engine} by default. The queue's tables "
            "use InnoDB, but others have no transactions: what atomic handlers write there is not rolled back.",
            hint="Set default_storage_engine = InnoDB on the server, or for the connections of this project: "
            f"DATABASES[{alias!r}]['OPTIONS']['init_command'] = \"SET default_storage_engine = InnoDB\".",
            id="django_mysqlqueue.W030",
        )
        for alias, engine in engines.items()
        if engine.upper() != "INNODB"
    ]


def _default_engine(alias: str) -> str:
    with sessions.sound(alias), connections[alias].cursor() as cursor:
        cursor.execute("SELECT @@SESSION.default_storage_engine")
        return str(cursor.fetchone()[0])


@checks.register(checks.Tags.database)
def check_tested_version(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if the queue is not tested on a server's version (W018)."""
    return [
        checks.Warning(
            f"The queue's database {alias!r} runs {name} {_dotted(version)}, on which django_mysqlqueue is not tested.",
            hint=f"Tests run on {_dotted(TESTED[name])} and later. The queue uses only SQL that "
            f"{_dotted(MINIMUM[name])} supports, but run your project's tests on this version.",
            id="django_mysqlqueue.W018",
        )
        for alias in _chosen(databases)
        for name, version in _version(alias)
        if name in TESTED and not _is_below(version, MINIMUM[name]) and _is_below(version, TESTED[name])
    ]


def _version(alias: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the dialect and version of a server; nothing if E011 reports that the queue cannot use it."""
    with sessions.sound(alias):  # a setting that E017 reports must not affect these queries
        try:
            return [(dialect_of(connections[alias]).name, server_version(connections[alias]))]
        except ImproperlyConfigured:
            return []


@checks.register(checks.Tags.database)
def check_sessions(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check the session variables of the project's connections to the queue's databases (E017).

    Subscribers and the queue's commands set these variables on their own connections; web processes do not.
    """
    found: list[checks.CheckMessage] = []
    for alias in _chosen(databases):
        connection = connections[alias]
        try:
            faults = dialect_of(connection).session_faults(connection)
        except ImproperlyConfigured:
            continue  # reported by E011
        found += [
            checks.Error(
                f"Connections to the queue's database {alias!r} have {one.name} = {value}: {one.effect}.",
                hint=f"Set {one.name} = {one.value} on the server, or for the connections of this project: "
                f"DATABASES[{alias!r}]['OPTIONS']['init_command'] = \"SET {one.name} = {one.value}\".",
                id="django_mysqlqueue.E017",
            )
            for one, value in faults
        ]
    return found


def _aliases() -> list[str]:
    """Return the aliases of the queue's databases."""
    try:
        return [alias for alias in queue_aliases() if alias in connections]
    except ImproperlyConfigured:
        return []  # reported by E001 to E006


def _chosen(databases: Sequence[str] | None) -> list[str]:
    """Return those of the queue's databases that Django passes to a check of databases."""
    return [alias for alias in _aliases() if alias in (databases or ())]


@checks.register(checks.Tags.database)
def check_tables(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn about one of several databases that lacks the queue's tables (W022)."""
    if len(_aliases()) == 1:
        return []  # Every command says so.
    return [
        checks.Warning(
            f"The settings put topics into database {alias!r}, which lacks the queue's tables.",
            hint=f"Run {failures.migrate_command(alias)}, unless this is that command.",
            id="django_mysqlqueue.W022",
        )
        for alias in _chosen(databases)
        if not _has_tables(alias)
    ]


def _has_tables(alias: str) -> bool:
    try:
        return GROUPS in connections[alias].introspection.table_names()
    except (DatabaseError, ImproperlyConfigured):
        return True  # The server cannot be reached, or the settings name none, which others report.


@checks.register(checks.Tags.database)
def check_packets(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if a database accepts smaller statements than the one via which its topics are published (W023)."""
    if conf.problems() or len(_aliases()) == 1:
        return []
    topics = conf.get_settings().topics
    limits = {alias: limit for alias in _chosen(databases) if (limit := _max_packet(alias)) is not None}
    pairs = {(queue_alias(topic=name), topics.of(name).via) for name in topics}
    return [
        checks.Warning(
            f"Database {target!r} has max_allowed_packet = {limits[target]}, less than database {via!r} with "
            f"{limits[via]}, via which messages are published for it.",
            hint=f"A message that {target!r} refuses stops the relay. Set max_allowed_packet = {limits[via]} there.",
            id="django_mysqlqueue.W023",
        )
        for target, via in sorted((target, via) for target, via in pairs if via in limits and target in limits)
        if limits[target] < limits[via]
    ]


def _max_packet(alias: str) -> int | None:
    """Return max_allowed_packet; None if the database has none, or cannot be reached, which others report."""
    connection = connections[alias]
    try:
        return dialect_of(connection).max_statement_bytes(connection) if is_server(connection) else None
    except (DatabaseError, ImproperlyConfigured):
        return None


@checks.register(checks.Tags.database)
def check_overrides(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn about overrides that the code does not know: subscribers ignore them, or refuse a filter (W019)."""
    return [
        checks.Warning(
            f"{one.name} of the group {ref.group!r} on topic {ref.topic!r}{_where(alias)} is overridden with "
            f"{shortened(one.override.text)}, but subscribers "
            f"{'claim nothing because of it' if one.refused else 'ignore that'}: {one.ignored}.",
            hint=f"Remove it: manage.py queueset {ref.group} {ref.topic} --unset {one.name}",
            id="django_mysqlqueue.W019",
        )
        for alias, ref, options in _options_of_groups(databases)
        for one in options
        if one.override is not None and one.ignored
    ]


@checks.register(checks.Tags.database)
def check_registered(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn about registered options that differ from those of the code (W020)."""
    return [
        checks.Warning(
            f"{one.name} of the group {ref.group!r} on topic {ref.topic!r}{_where(alias)} is {one.code_text} in the "
            f"code, but {one.registered_text} is registered.",
            hint="Subscribers ignore the limits, filter and allowed users of the code until migrate registers them.",
            id="django_mysqlqueue.W020",
        )
        for alias, ref, options in _options_of_groups(databases)
        for one in options
        if one.source and one.registered_text
    ]


@checks.register(checks.Tags.database)
def check_procedures(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn about stored procedures of another release or for other settings, and about missing ones (W021).

    Warn about a server on which sessions can set the clock of the procedures (W029).
    """
    if conf.problems() or not (aliases := _chosen(databases)):
        return []
    from django_mysqlqueue.procedures import installing

    found: list[checks.CheckMessage] = []
    for alias in aliases:
        if not is_server(connections[alias]):
            continue
        try:
            with sessions.sound(alias):
                state = installing.state(alias)
                follows = state.is_installed and installing.follows_sessions(alias)
        except (SubscriberError, DatabaseError):
            continue  # E008 reports it; or the server cannot be reached
        is_wanted = alias in {
            queue_alias(topic=name) for names in conf.get_settings().sql_topics.values() for name in names
        }
        if follows:
            hint = "Start the server without this option."
            found.append(checks.Warning(installing.SYSDATE_IS_NOW, hint=hint, id="django_mysqlqueue.W029"))
        if state.is_current or not (state.is_installed or is_wanted):
            continue
        text = (
            f"The stored procedures for clients in plain SQL{_where(alias)} are those of another release, or for other "
            "settings."
        )
        if not state.is_installed:
            text = (
                "MYSQLQUEUE['GROUPS'] has SQL_TOPICS, but the stored procedures for clients in plain SQL"
                f"{_where(alias)} are missing."
            )
        found.append(checks.Warning(text, hint="Run manage.py queueprocedures.", id="django_mysqlqueue.W021"))
    return found


def _where(alias: str) -> str:
    """Return which of several databases a text is about."""
    return f" in database {alias!r}" if len(_aliases()) > 1 else ""


def _options_of_groups(
    databases: Sequence[str] | None,
) -> Iterator[tuple[str, GroupRef, Sequence[inspection.GroupOption]]]:
    """Yield the options of the registered groups; nothing if they cannot be read, which other checks report."""
    if conf.problems():
        return
    for alias in _chosen(databases):
        try:
            with sessions.sound(alias):  # a setting that E017 reports must not affect this query
                found = inspection.list_options(using=alias)
        except (SubscriberError, DatabaseError, ImproperlyConfigured):
            continue  # E008 or E011 reports it; or the tables are not there yet
        for ref, options in found.items():
            yield alias, ref, options


def server_problems(alias: str) -> Iterator[str]:
    """Yield the reasons why a database server cannot run the queue. Subscribers check this, too, before they start."""
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
        if not connection.settings_dict["NAME"]:
            yield f"The queue's database {alias!r} has no NAME in DATABASES."
        return
    with connection.cursor() as cursor:
        cursor.execute(
            "SHOW VARIABLES WHERE Variable_name IN ('wsrep_on', 'binlog_format', 'log_bin', 'enforce_storage_engine')"
        )
        variables = {name.lower(): str(value).upper() for name, value in cursor.fetchall()}
        if variables.get("wsrep_on") == "ON":
            yield f"The queue's database {alias!r} is a Galera node: the sequencer's lock would be local to the node."
        if variables.get("binlog_format") == "STATEMENT" and variables.get("log_bin") == "ON":
            yield f"The queue's database {alias!r} has binlog_format=STATEMENT: READ COMMITTED requires ROW or MIXED."
        enforced = variables.get("enforce_storage_engine") or "INNODB"
        if enforced != "INNODB":
            yield (
                f"The server of the queue's database {alias!r} creates all tables with {enforced} "
                "(enforce_storage_engine): the queue requires InnoDB."
            )
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
