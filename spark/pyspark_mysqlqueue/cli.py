"""Commands that ``python -m pyspark_mysqlqueue`` and the management commands share.

They need no Django, so that they also run under ``spark-submit``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any, NamedTuple

from tqdm import tqdm

from pyspark_mysqlqueue import log_offsets
from pyspark_mysqlqueue.archive import run
from pyspark_mysqlqueue.archive.root import Root
from pyspark_mysqlqueue.archive.run import Job
from pyspark_mysqlqueue.archive.table import Table
from pyspark_mysqlqueue.databases import URL_VARIABLE, Place, faults
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.options import Edge, parse_edge, parse_time
from pyspark_mysqlqueue.session import session

Say = Callable[[str], object]
NO_PATH = "the archive's path is not configured: pass --path or set MYSQLQUEUE['ARCHIVE_PATH']"
PATH_HELP = "folder or URI of the archive (default with manage.py: MYSQLQUEUE['ARCHIVE_PATH'])"
MASTER_HELP = "Spark's master URL (default: the one given to spark-submit, else local[*])"
FORMAT_HELP = "output format (default: text)"
ACTIONS = ("grow", "verify", "compact", "expire", "vacuum", "new-epoch", "status")


class Failed(PipelineError):
    """The archive has faults."""


def positive(text: str) -> int:
    """Parse a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: The number is below 1.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return number


def hours(text: str) -> float:
    """Parse a number of hours of at least 0.

    Raises:
        argparse.ArgumentTypeError: The number is negative, too large or not finite.
    """
    number = float(text)
    if not 0 <= number < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0 and below 1,000,000")
    return number


def day(text: str) -> datetime.date:
    """Parse a date in ISO 8601.

    Raises:
        argparse.ArgumentTypeError: The text is not a date.
    """
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a date such as 2026-11-22") from error


def archive_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``archive`` to a parser."""
    parser.add_argument(
        "action",
        nargs="?",
        choices=ACTIONS,
        default="grow",
        help="grow (default): archive the messages that the archive does not have yet; verify: read every file and "
        "compare each row with its checksum; compact: merge small files; expire: remove old messages from the archive; "
        "vacuum: delete files that the table no longer has; new-epoch: accept a log that was restored from a backup; "
        "status: show the archive's size and its last offset",
    )
    parser.add_argument("--path", metavar="ROOT", help=PATH_HELP)
    parser.add_argument("--master", metavar="URL", help=MASTER_HELP)
    parser.add_argument(
        "--local", action="store_true",
        help="use processes of this machine, not Spark (the default if PySpark is not installed)",
    )  # fmt: skip
    parser.add_argument(
        "--commit-offsets", type=positive, default=run.COMMIT_OFFSETS, metavar="N",
        help="grow: maximum number of offsets per commit (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--task-offsets", type=positive, default=run.TASK_OFFSETS, metavar="N",
        help="grow: maximum number of offsets per task (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--before", type=day, metavar="DAY",
        help="expire: remove the messages that were published before this date (UTC)",
    )  # fmt: skip
    parser.add_argument(
        "--keep", type=hours, default=run.KEEP.total_seconds() / 3600, metavar="HOURS",
        help="vacuum: keep the files of versions that are younger (default: %(default)g; at least 1)",
    )  # fmt: skip
    parser.add_argument("--format", choices=("text", "json"), default="text", help=FORMAT_HELP)


def archive(options: Mapping[str, Any], place: Place, say: Say) -> None:
    """Run one action of the command ``archive``.

    Args:
        options: The parsed arguments.
        place: The queue's database.
        say: Called with each line of output.

    Raises:
        PipelineError: The action failed, or ``verify`` found faults.
    """
    if not options["path"]:
        raise PipelineError(NO_PATH)
    root = Root(options["path"])
    action = options["action"]
    if action == "expire" and options["before"] is None:
        raise PipelineError("expire needs --before DAY")
    if action == "status":
        facts = _status(place, root)
    else:
        todo = _pending(place, root) if action == "grow" else 0
        # Spark takes seconds to start, so start it only for actions that run tasks.
        has_tasks = todo or action in ("verify", "expire")
        spark = session(options["master"], name="queuearchive") if has_tasks and not _is_local(options) else None
        facts = _act(Job(spark, place, root), action, options, todo)
    lines = facts.pop("says")
    if options["format"] == "json":
        say(json.dumps({"action": action, **facts}, default=str))
    else:
        for line in lines:
            say(line)
    if facts.get("faults"):
        raise Failed(f"the archive has {_counted(len(facts['faults']), 'fault')}")


def _is_local(options: Mapping[str, Any]) -> bool:
    if options["local"] and options["master"]:
        raise PipelineError("pass --local or --master, not both")
    return options["local"] or (not options["master"] and find_spec("pyspark") is None)


def _pending(place: Place, root: Root) -> int:
    with place.connect() as database:
        return run.pending(database, root)


def _act(job: Job, action: str, options: Mapping[str, Any], todo: int) -> dict[str, Any]:
    quiet = options["format"] == "json"
    if action == "expire":
        rows = run.expire(job, before=options["before"])
        return {
            "rows": rows,
            "says": [f"Removed {_counted(rows, 'message')} from the archive.", "Run vacuum to delete the files."],
        }
    if action == "vacuum":
        gone = run.vacuum(job, keep=datetime.timedelta(hours=options["keep"]))
        return {"files": len(gone), "says": [f"Deleted {_counted(len(gone), 'file')}."]}
    if action == "new-epoch":
        log = run.new_epoch(job)
        return {"log": log.id, "epoch": log.epoch, "says": [f"The log {log.id} has the epoch {log.epoch} now."]}
    if action == "grow":
        with _bar(todo, "offsets", quiet) as bar:
            grown = run.grow(
                job,
                commit_offsets=options["commit_offsets"],
                task_offsets=options["task_offsets"],
                progress=bar.update,
            )
        added = f"{_counted(grown.rows, 'message')} in {_counted(grown.commits, 'commit')}"
        says = [f"Archived {added}, {_size(grown.size)}.", f"All offsets up to {grown.archived} are archived."]
        if grown.missed:
            says.append(
                f"GC has removed messages up to offset {grown.missed} before they were archived. Set "
                "MYSQLQUEUE['ARCHIVE_REQUIRED'], or run the command more often than the retention expires."
            )
        return {**asdict(grown), "says": says}
    known = Table.open(job.root).files()
    if action == "compact":
        with _bar(sum(one.rows for one in known), "rows", quiet) as bar:
            rows = run.compact(job, progress=bar.update)
        after = len(Table.open(job.root).files())
        says = [f"Merged {_counted(len(known), 'file')} into {after:,}, and wrote {_counted(rows, 'message')} again."]
        return {"rows": rows, "files": after, "says": says}
    with _bar(len(known), "files", quiet) as bar:
        faults = run.verify(job, progress=bar.update)
    rows = sum(one.rows for one in known)
    return {
        "files": len(known),
        "rows": rows,
        "faults": [asdict(fault) for fault in faults],
        "says": [f"{fault.path or 'table'}: {fault.says}" for fault in faults]
        or [f"No faults in {_counted(len(known), 'file')} with {_counted(rows, 'message')}."],
    }


# -- replay -------------------------------------------------------------------


def edge(text: str) -> Edge:
    """Parse one end of ``--between``.

    Raises:
        argparse.ArgumentTypeError: The text is not an offset, a time, ``earliest`` or ``latest``.
    """
    try:
        return parse_edge("--between", text)
    except PipelineError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``replay`` to a parser."""
    parser.add_argument("--path", metavar="ROOT", help=PATH_HELP)
    parser.add_argument("--master", metavar="URL", help=MASTER_HELP)
    parser.add_argument(
        "--from-archive", action="store_true", help="read the messages from the archive (the default and only source)"
    )
    parser.add_argument("--topic", required=True, help="topic of the original messages")
    parser.add_argument(
        "--between", nargs=2, type=edge, default=("earliest", "latest"), metavar=("START", "END"),
        help="range of messages: offsets, times such as 2026-11-22T06:00:00Z, 'earliest' or 'latest'; END is not "
        "included (default: the whole archive)",
    )  # fmt: skip
    parser.add_argument(
        "--where", default="", metavar="SQL", help="condition on the log's columns, in Spark SQL (default: none)"
    )
    parser.add_argument("--to", default="", metavar="TOPIC", help="publish the copies to this topic")
    parser.add_argument(
        "--group", default="", help="publish the copies to the same topic, for this consumer group only"
    )
    parser.add_argument(
        "--run", default="", metavar="NAME",
        help="name of the run (default: a digest of the messages' topic, range, condition and target). A second run "
        "with the same name skips messages that the first run published and that are still in the log",
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=float, metavar="N", help="maximum number of messages per second (default: no limit)"
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be replayed, then exit")
    parser.add_argument(
        "--noinput", "--no-input", action="store_false", dest="interactive", help="do not ask for confirmation"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help=FORMAT_HELP)


def replay(options: Mapping[str, Any], place: Place, say: Say) -> None:
    """Show what would be replayed, ask for confirmation, and replay it.

    Args:
        options: The parsed arguments.
        place: The queue's database.
        say: Called with each line of output.

    Raises:
        PipelineError: The replay failed or was cancelled, or no message matches.
    """
    from pyspark_mysqlqueue.replay import Replay, plan, play

    if not options["path"]:
        raise PipelineError(NO_PATH)
    since, until = options["between"]
    names = ("topic", "where", "to", "group", "run", "rate")
    what = Replay(since=since, until=until, **{name: options[name] for name in names})
    job = Job(session(options["master"], name="queuereplay"), place, Root(options["path"]))
    planned = plan(job, what)
    as_json = options["format"] == "json"
    facts: dict[str, Any] = {
        "run": what.name,
        "topic": what.target,
        "groups": planned.groups,
        "messages": planned.rows,
        "bytes": planned.size,
        "keys": planned.keys,
        "first": planned.first,
        "last": planned.last,
        "replayed": 0,
    }
    if not as_json:
        when = f", published from {planned.first} to {planned.last} (UTC)" if planned.first else ""
        selected = f"{_counted(planned.rows, 'message')} of topic {what.topic}"
        say(f"Selected {selected}, with {_counted(planned.keys, 'key')} and {_size(planned.size)} of payload{when}.")
        if what.group:
            readers = f"for the group {what.group} only"
        else:
            readers = f"read by {', '.join(planned.groups)}" if planned.groups else "which has no consumer group yet"
        say(f"The copies are published to topic {what.target}, {readers}. Name of the run: {what.name}")
    if not options["dry_run"] and planned.rows:
        if options["interactive"]:
            if as_json:
                raise PipelineError("--format json cannot ask for confirmation: pass --noinput or --dry-run")
            try:
                answer = input("Replay these messages? [y/N] ")
            except EOFError:
                raise PipelineError("cannot ask for confirmation without input: pass --noinput or --dry-run") from None
            if answer.strip().lower() not in ("y", "yes"):
                raise PipelineError("replay cancelled: nothing was changed")
        with _bar(len(planned.span), "offsets", as_json) as bar:
            facts["replayed"] = play(job, what, progress=bar.update)
        if not as_json:
            say(
                f"Wrote {_counted(facts['replayed'], 'message')} to the outbox. The sequencer drops those that are "
                "already in the log."
            )
    if as_json:
        say(json.dumps(facts, default=str))
    if not options["dry_run"] and not planned.rows:
        raise PipelineError(f"nothing was changed: no archived message of topic {what.topic} matches")


# -- report -------------------------------------------------------------------


def moment(text: str) -> datetime.datetime:
    """Parse a time in ISO 8601 (in UTC if it has no UTC offset), a date, or a duration before now.

    A duration is a number of minutes, hours, days or weeks: ``90m``, ``36h``, ``14d``, ``2w``.

    Raises:
        argparse.ArgumentTypeError: The text is none of these.
    """
    try:
        if ago := re.fullmatch(r"(\d{1,6})([mhdw])", text):
            unit = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}[ago[2]]
            return datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(**{unit: int(ago[1])})
        return parse_time(text)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be a time such as 2026-11-22T06:00:00Z, a date such as 2026-11-22, or a duration such as "
            "36h or 14d"
        ) from error


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report`` to a parser."""
    parser.add_argument(
        "--path", metavar="ROOT", help=f"{PATH_HELP}; without an archive, the report covers only the log"
    )
    parser.add_argument(
        "--since",
        type=moment,
        metavar="TIME",
        help="start of the period: a time such as 2026-11-22T06:00 (in UTC if it has no UTC offset), a date, or a "
        "duration before now such as 36h or 14d (default: the oldest message)",
    )
    parser.add_argument(
        "--until",
        type=moment,
        metavar="TIME",
        help="end of the period, not included, in the same form as --since (default: now)",
    )
    parser.add_argument(
        "--topic", action="append", metavar="TOPIC", help="report on this topic only; may be repeated (default: all)"
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder for the report: new, empty, or with an earlier report"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help=FORMAT_HELP)


def report(options: Mapping[str, Any], place: Place, say: Say) -> None:
    """Write a report.

    Args:
        options: The parsed arguments. A project adds ``retention`` from its settings: see ``run_report``.
        place: The queue's database.
        say: Called with each line of output.

    Raises:
        PipelineError: The report cannot be written.
    """
    from pyspark_mysqlqueue.report import run_report

    root = Root(options["path"]) if options["path"] else None
    period = options["since"], options["until"]
    made = run_report(place, root, *period, options["topic"], options["out"], retention=options.get("retention"))
    if options["format"] == "json":
        say(json.dumps({"page": str(made[0]), "tables": str(made[1].parent)}))
        return
    say(f"Wrote {made[0]}. Open it in a browser. Its tables are in {made[1].parent}, as Parquet and CSV.")


def _status(place: Place, root: Root) -> dict[str, Any]:
    table = Table.find(root)
    with place.connect() as database:
        log, last = log_offsets.identity(database), log_offsets.highest(database)
    files = [] if table is None else table.files()
    end = 0 if table is None else table.archived(log)
    rows, size = sum(one.rows for one in files), sum(one.size for one in files)
    says = [
        f"Archive {root.uri}: {_counted(rows, 'message')}, {_size(size)}, {_counted(len(files), 'file')}.",
        f"All offsets up to {end} are archived. The log ends at offset {last}.",
    ]
    return {"files": len(files), "rows": rows, "size": size, "archived": end, "log": last, "says": says}


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _size(size: int) -> str:
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _bar(total: int, unit: str, quiet: bool) -> Any:  # noqa: FBT001
    return tqdm(total=total, unit=f" {unit}", unit_scale=True, disable=True if quiet else None, file=sys.stderr)


# -- without Django -----------------------------------------------------------


def place_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that locate the queue's database to a parser."""
    group = parser.add_argument_group(
        "the queue's database", f"default: the URL in the environment variable {URL_VARIABLE}"
    )
    group.add_argument(
        "--defaults-file", default="", metavar="FILE", help="MySQL option file with the connection parameters"
    )
    group.add_argument(
        "--defaults-group", default="client", metavar="GROUP", help="group in the option file (default: client)"
    )
    group.add_argument("--sqlite-file", default="", metavar="FILE", help="SQLite database file")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m pyspark_mysqlqueue``.

    Args:
        arguments: The command line without the program's name (None: that of this process).

    Returns:
        The exit status: 1 after an error, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m pyspark_mysqlqueue",
        description="Archive, report on and replay the queue's log with Spark. Needs no Django project.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for one in COMMANDS:
        sub = commands.add_parser(one.name, help=one.help, description=one.help)
        one.add_arguments(sub)
        place_arguments(sub)
    options = vars(parser.parse_args(arguments))
    place = Place(options["defaults_file"], options["defaults_group"], options["sqlite_file"])
    try:
        perform(options["command"], options, place, print)
    except PipelineError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


class Command(NamedTuple):
    """A command of ``python -m pyspark_mysqlqueue``, and of ``manage.py`` with the prefix ``queue``."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    work: Callable[[Mapping[str, Any], Place, Say], None]


COMMANDS = (
    Command("archive", "Copy the log into Parquet files, and maintain them.", archive_arguments, archive),
    Command("report", "Write an HTML report about the whole history of the queue.", report_arguments, report),
    Command("replay", "Publish archived messages again.", replay_arguments, replay),
)


def command(name: str) -> Command:
    """Return the command with this name."""
    return next(one for one in COMMANDS if one.name == name)


def perform(name: str, options: Mapping[str, Any], place: Place, say: Say) -> None:
    """Run a command.

    Args:
        name: Its name.
        options: The parsed arguments.
        place: The queue's database.
        say: Called with each line of output.

    Raises:
        PipelineError: It failed, or the database or a file cannot be used.
    """
    with faults():
        command(name).work(options, place, say)
