"""What ``python -m django_mysqlqueue.pipeline`` and the management commands share.

The former needs no Django, so that it also runs under ``spark-submit``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from tqdm import tqdm

from django_mysqlqueue.pipeline import log_offsets
from django_mysqlqueue.pipeline.archive import manifest, run
from django_mysqlqueue.pipeline.archive.files import Root
from django_mysqlqueue.pipeline.archive.run import Job
from django_mysqlqueue.pipeline.databases import URL_VARIABLE, Place
from django_mysqlqueue.pipeline.errors import PipelineError
from django_mysqlqueue.pipeline.options import Edge, parse_edge
from django_mysqlqueue.pipeline.session import session

Say = Callable[[str], object]
NO_PATH = "nothing says where the archive is: pass --path, or set MYSQLQUEUE['ARCHIVE_PATH']"
ACTIONS = ("grow", "verify", "compact", "expire", "sweep", "status")


class Failed(PipelineError):
    """The command has done its work and found something wrong."""


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return number


def hours(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 or more")
    return number


def day(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a day like 2026-11-22") from error


def archive_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=ACTIONS,
        default="grow",
        help="grow (the default): archive what is not yet; verify: read every file and compare; compact: merge small "
        "segments; expire: let old segments go; sweep: delete files that no segment names; status: what there is",
    )
    parser.add_argument("--path", metavar="ROOT", help="the archive's folder or URI")
    parser.add_argument("--master", metavar="URL", help="Spark's master (default: spark-submit's, else local[*])")
    parser.add_argument("--segment-offsets", type=positive, default=run.SEGMENT_OFFSETS, metavar="N")
    parser.add_argument("--task-offsets", type=positive, default=run.TASK_OFFSETS, metavar="N")
    parser.add_argument("--rows", type=positive, default=run.COMPACT_ROWS, metavar="N", help="compact: of one segment")
    parser.add_argument("--before", type=day, metavar="DAY", help="expire: segments wholly older than this day (UTC)")
    parser.add_argument(
        "--grace", type=hours, default=run.GRACE.total_seconds() / 3600, metavar="HOURS", help="sweep: how old at least"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")


def archive(options: Mapping[str, Any], place: Place, say: Say) -> None:
    """Runs one action of the archive's command.

    Raises:
        PipelineError: it was not done, or ``verify`` has found something wrong.
    """
    if not options["path"]:
        raise PipelineError(NO_PATH)
    root = Root(options["path"])
    action = options["action"]
    if action == "expire" and options["before"] is None:
        raise PipelineError("expire: pass --before DAY")
    if action == "status":
        facts = _status(place, root)
    else:
        # Spark takes seconds to start: not for nothing, and not for what needs no task.
        spark = session(options["master"], name="queuearchive") if _needs_spark(action, place) else None
        facts = _act(Job(spark, place, root), action, options)  # type: ignore[arg-type]
    lines = facts.pop("says")
    if options["format"] == "json":
        say(json.dumps({"action": action, **facts}, default=str))
    else:
        for line in lines:
            say(line)
    if facts.get("faults"):
        raise Failed(f"{len(facts['faults'])} faults in the archive")


def _needs_spark(action: str, place: Place) -> bool:
    if action in ("expire", "sweep"):
        return False
    if action != "grow":
        return True
    with place.connect() as database:
        return bool(run.pending(database))


def _act(job: Job, action: str, options: Mapping[str, Any]) -> dict[str, Any]:
    quiet = options["format"] == "json"
    if action == "expire":
        old = run.expire(job, before=options["before"])
        rows = sum(segment.rows for segment in old)
        return {
            "segments": len(old),
            "rows": rows,
            "says": [f"{len(old)} segments with {rows:,} messages have left the archive; sweep deletes their files."],
        }
    if action == "sweep":
        gone = run.sweep(job, grace=datetime.timedelta(hours=options["grace"]))
        return {"files": len(gone), "says": [f"{len(gone)} files that no segment names were deleted."]}
    with job.place.connect() as database:
        known = manifest.segments(database)
        todo = sum(map(len, run.pending(database)))
    if action == "grow":
        with _bar(todo, quiet) as bar:
            grown = run.grow(
                job,
                segment_offsets=options["segment_offsets"],
                task_offsets=options["task_offsets"],
                progress=bar.update,
            )
        line = f"{grown.rows:,} messages in {grown.segments} segments, {_size(grown.size)}. "
        says = [line + f"All offsets up to {grown.archived} are in the archive."]
        if grown.missed:
            says.append(
                f"GC had taken messages up to offset {grown.missed} before they could be archived: set "
                "MYSQLQUEUE['ARCHIVE_REQUIRED'], or run this more often than the retention."
            )
        return {**asdict(grown), "says": says}
    if action == "compact":
        groups = run.mergeable(known, options["rows"])
        with _bar(sum(group[-1].hi - group[0].lo + 1 for group in groups), quiet) as bar:
            merged = run.compact(job, rows=options["rows"], progress=bar.update)
        return {"merged": merged, "says": [f"{merged} segments were merged into {len(groups)}."]}
    with _bar(sum(one.hi - one.lo + 1 for one in known), quiet) as bar:
        faults = run.verify(job, progress=bar.update)
    says = [f"{fault.lo} to {fault.hi}: {fault.path or 'the manifest'}: {fault.says}" for fault in faults]
    return {
        "segments": len(known),
        "rows": sum(one.rows for one in known),
        "faults": [asdict(fault) for fault in faults],
        "says": says or [f"{len(known)} segments with {sum(one.rows for one in known):,} messages are as they were."],
    }


# -- replay -------------------------------------------------------------------


def edge(text: str) -> Edge:
    try:
        return parse_edge("--between", text)
    except PipelineError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--path", metavar="ROOT", help="the archive's folder or URI")
    parser.add_argument("--master", metavar="URL", help="Spark's master (default: spark-submit's, else local[*])")
    parser.add_argument("--from-archive", action="store_true", help="where the originals are: the only choice so far")
    parser.add_argument("--topic", required=True, help="of the originals")
    parser.add_argument(
        "--between", nargs=2, type=edge, default=("earliest", "latest"), metavar=("START", "END"),
        help="offsets, or times like 2026-11-22T06:00:00Z; END is not included",
    )  # fmt: skip
    parser.add_argument("--where", default="", metavar="SQL", help="a condition on the log's columns, in Spark's SQL")
    parser.add_argument("--to", default="", metavar="TOPIC", help="the topic of the copies")
    parser.add_argument("--group", default="", help="instead of --to: the one group of the same topic that sees them")
    parser.add_argument("--run", default="", metavar="NAME", help="its name: one that was run before adds nothing")
    parser.add_argument("--rate", type=float, metavar="N", help="messages a second at most")
    parser.add_argument("--dry-run", action="store_true", help="say what would happen, and do nothing")
    parser.add_argument("--noinput", "--no-input", action="store_false", dest="interactive", help="do not ask")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def replay(options: Mapping[str, Any], place: Place, say: Say) -> None:
    """Says what would be replayed, asks, and does it.

    Raises:
        PipelineError: it was not done, or there was nothing to do.
    """
    from django_mysqlqueue.pipeline.replay import Replay, plan, play

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
        say(f"{planned.rows:,} messages of {what.topic} with {planned.keys:,} keys, {_size(planned.size)}{when}.")
        seen = f"by {', '.join(planned.groups)}" if planned.groups else "by nobody yet: the topic has no group"
        say(f"They would come into {what.target} and be seen {seen}. Run: {what.name}")
    if not options["dry_run"] and planned.rows:
        if options["interactive"]:
            if as_json:
                raise PipelineError("--format json cannot ask: pass --noinput to do it, or --dry-run")
            try:
                answer = input("Replay them? [y/N] ")
            except EOFError:
                raise PipelineError("there is nobody to ask: pass --noinput to do it, or --dry-run") from None
            if answer.strip().lower() not in ("y", "yes"):
                raise PipelineError("nothing was done")
        with _bar(len(planned.span), as_json) as bar:
            facts["replayed"] = play(job, what, progress=bar.update)
        if not as_json:
            say(f"{facts['replayed']:,} messages are in the outbox; those that this run sent before are dropped.")
    if as_json:
        say(json.dumps(facts, default=str))
    if not options["dry_run"] and not planned.rows:
        raise PipelineError(f"nothing was changed: no archived message of {what.topic} matches")


# -- report -------------------------------------------------------------------


def report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--path", metavar="ROOT", help="the archive's folder or URI (without one: the live log alone)")
    parser.add_argument("--master", metavar="URL", help="Spark's master (default: spark-submit's, else local[*])")
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="from when on: a time like 2026-11-22T06:00 (UTC unless it says otherwise), a day, or a length of "
        "time before now like 36h or 14d (default: everything)",
    )
    parser.add_argument("--until", metavar="TIME", help="until before when, written in the same way (default: now)")
    parser.add_argument("--topic", action="append", metavar="TOPIC", help="only this one; may be repeated")
    parser.add_argument("--out", required=True, metavar="DIR", help="a folder: new, empty, or an earlier report's")


def report(options: Mapping[str, Any], place: Place, say: Say) -> None:
    """Makes a report. Of a project's settings it takes ``retention`` and ``redact``, as ``run_report`` does.

    Raises:
        PipelineError: it was not made.
    """
    from django_mysqlqueue.pipeline.report import files, run_report
    from django_mysqlqueue.pipeline.report.options import parse_moment

    now = datetime.datetime.now(datetime.UTC)
    since, until = (
        None if options[name] is None else parse_moment(f"--{name}", options[name], now) for name in ("since", "until")
    )
    files.Folder(options["out"])  # before Spark takes its seconds to start
    root = Root(options["path"]) if options["path"] else None
    spark = session(options["master"], name="queuereport")
    of_project = {name: options[name] for name in ("retention", "redact") if name in options}
    with tqdm(unit=" questions", disable=None, file=sys.stderr) as bar:

        def progress(what: str) -> None:
            bar.set_description(what)
            bar.update()

        made = run_report(
            spark, place, root, since, until, options["topic"], options["out"], progress=progress, **of_project
        )
    say(f"{made[0]}: open it in a browser. Its {len(made) - 1} tables are in {made[1].parent}.")


def _status(place: Place, root: Root) -> dict[str, Any]:
    with place.connect() as database:
        known = manifest.segments(database)
        last = log_offsets.highest(database)
    end = manifest.archived(known)
    rows, size = sum(one.rows for one in known), sum(one.size for one in known)
    files = sum(len(one.files) for one in known)
    says = [
        f"{rows:,} messages in {len(known)} segments and {files} files, {_size(size)}, below {root.uri}.",
        f"All offsets up to {end} are in it; the log ends at {last}.",
    ]
    return {
        "segments": len(known),
        "files": files,
        "rows": rows,
        "size": size,
        "archived": end,
        "log": last,
        "says": says,
    }


def _size(size: int) -> str:
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _bar(total: int, quiet: bool) -> Any:  # noqa: FBT001
    return tqdm(total=total, unit=" offsets", unit_scale=True, disable=True if quiet else None, file=sys.stderr)


# -- without Django -----------------------------------------------------------


def place_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the queue's database", f"without these: the environment's {URL_VARIABLE}")
    group.add_argument("--defaults-file", default="", metavar="FILE", help="a MySQL option file")
    group.add_argument("--defaults-group", default="client", metavar="GROUP", help="its group (default: client)")
    group.add_argument("--sqlite-file", default="", metavar="FILE")


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m django_mysqlqueue.pipeline``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m django_mysqlqueue.pipeline", description="The queue's log in PySpark, without Django."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for one in COMMANDS:
        sub = commands.add_parser(one.name, help=one.help, description=one.help)
        one.add_arguments(sub)
        place_arguments(sub)
    options = vars(parser.parse_args(arguments))
    place = Place(options["defaults_file"], options["defaults_group"], options["sqlite_file"])
    try:
        command(options["command"]).work(options, place, print)
    except PipelineError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


class Command(NamedTuple):
    """One command, here and of ``manage.py``."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    work: Callable[[Mapping[str, Any], Place, Say], None]


COMMANDS = (
    Command("archive", "Moves the log, range by range, into Parquet files.", archive_arguments, archive),
    Command("report", "Makes an HTML page about what the queue did.", report_arguments, report),
    Command("replay", "Puts archived messages back into the queue.", replay_arguments, replay),
)


def command(name: str) -> Command:
    return next(one for one in COMMANDS if one.name == name)
