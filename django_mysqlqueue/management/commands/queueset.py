"""``manage.py queueset``: override options of a consumer group while its subscribers run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.exceptions import OperationRefused, SubscriberError
from django_mysqlqueue.inspection import GroupOption, list_options
from django_mysqlqueue.management.operations import ListCommand
from django_mysqlqueue.management.tables import write_table
from django_mysqlqueue.operations.lookups import group_of
from django_mysqlqueue.operations.results import Result
from django_mysqlqueue.options.table import parse_text, storable
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.text.humanize import moment, shortened

Listed = Sequence[tuple[GroupRef, GroupOption]]


class Command(ListCommand):
    """Override options of a consumer group, or list its options."""

    json_indent: ClassVar[int | None] = None
    _of_group = False
    """Whether the options of one group are listed, not the overrides of all groups."""
    help = (
        "Override options of a consumer group while its subscribers run. Without an option, list the group's options; "
        "without a group, list all overridden options."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("group", nargs="?", help="consumer group")
        parser.add_argument("topic", nargs="?", help="topic that the group reads")
        parser.add_argument(
            "option",
            nargs="*",
            metavar="OPTION=VALUE",
            help="option of @subscriber and its new value, for example max_attempts=3, visibility_timeout=5m or "
            '\'filter={"region": ["eu"]}\'; none: no limit, no filter',
        )
        parser.add_argument(
            "--unset", action="append", default=[], metavar="OPTION", help="remove the override of OPTION (repeatable)"
        )
        parser.add_argument("--list", action="store_true", help="list the options and where their values come from")

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Return a parser that accepts options between the arguments."""
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.parse_args = parser.parse_intermixed_args  # type: ignore[method-assign]
        return parser

    def handle(self, *args: Any, **options: Any) -> None:
        if options["group"] is not None and options["topic"] is None:
            raise CommandError("Pass the topic, too: GROUP TOPIC.")
        changes = self.is_change(options)
        if changes and options["group"] is None:
            raise CommandError("To change options, pass the group and its topic: GROUP TOPIC.")
        if changes and options["list"]:
            raise CommandError("--list cannot be combined with OPTION=VALUE or --unset.")
        super().handle(*args, **options)

    def is_change(self, options: Mapping[str, Any]) -> bool:
        return bool(options["option"] or options["unset"])

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        self._of_group = options["group"] is not None
        try:
            super().run_on(using, options)
        except (OperationRefused, SubscriberError) as error:
            raise CommandError(str(error)) from error

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        values: dict[str, Any] = {}
        for text in options["option"]:
            name, equals, value = text.partition("=")
            if not equals:
                raise CommandError(f"{text!r}: must be OPTION=VALUE.")
            if name in values:
                raise CommandError(f"{name}: is given twice.")
            try:
                values[name] = parse_text(name, value)
            except ValueError as error:
                raise CommandError(str(error)) from error
        return operations.settings(options["group"], options["topic"], values, unset=options["unset"], **how)

    def read(self, using: str, options: dict[str, Any]) -> Listed:
        group, topic = options["group"], options["topic"]
        try:
            if group is not None:
                group_of(using, group, topic, unfinished=["", "seek", "drop", "move"])
            return [
                (ref, one)
                for ref, options_of in list_options(group=group, topic=topic, using=using).items()
                for one in options_of
                if group is not None or one.override
            ]
        except (OperationRefused, SubscriberError) as error:
            raise CommandError(str(error)) from error

    def as_json(self, using: str, found: Listed) -> dict[str, Any]:
        facts = [{"group": ref.group, "topic": ref.topic, **_as_json(one)} for ref, one in found]
        return {"database": using, "options": facts}

    def show(self, using: str, found: Listed) -> None:
        if self._of_group:
            rows = [(one.name, shortened(one.text), _origin(one)) for _ref, one in found]
            write_table(self.stdout, ("option", "value", "from"), rows)
            for _ref, one in found:
                if shortened(one.text) != one.text:
                    self.stdout.write(f"\n{one.name}={one.text}")
        elif found:
            table = [(*ref, one.name, shortened(one.text), _origin(one)) for ref, one in found]
            write_table(self.stdout, ("group", "topic", "option", "value", "from"), table)
        else:
            self.stdout.write("No options are overridden.")


def _origin(one: GroupOption) -> str:
    override = one.override
    if override is None:
        return f"{one.origin}; subscribers claim nothing: {one.ignored}" if one.refused else one.origin
    when = f" at {moment(override.at)} by {override.by}" if override.at else ""
    if one.refused:
        return f"overridden{when}; subscribers claim nothing: {one.ignored}"
    if one.ignored:
        return f"{one.source or 'unknown'}; the override {override.text}{when} is ignored: {one.ignored}"
    return f"overridden{when}" + (f", otherwise {one.without_override}" if one.source or one.registered_text else "")


def _as_json(one: GroupOption) -> dict[str, Any]:
    override = one.override
    return {
        "option": one.name,
        "value": storable(one.value),
        "code_value": storable(one.code_value),
        "registered": storable(one.registered),
        "source": one.source,
        "override": override and {"value": override.value, "at": override.at, "by": override.by},
        "ignored": one.ignored,
    }
