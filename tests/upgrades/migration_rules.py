"""What a migration may do so that subscribers of the version before it go on working.

Expand, then contract: a release only adds to the schema; what no supported
version uses any more goes in a later one, whose migration says so with
``contract_of = "<the last version that used it>"``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db import migrations, models
from django.db.migrations.state import ProjectState

STATE_ONLY = (migrations.AlterModelOptions, migrations.AlterModelManagers)


def contractions(migration: migrations.Migration, state: ProjectState) -> list[str]:
    """What of a migration would break the version before it; ``state`` is the models' before it."""
    declared = getattr(migration, "contract_of", None)
    if declared is not None:
        return [] if isinstance(declared, str) and declared else ["contract_of must name a version"]
    return list(_problems(migration.operations, migration.app_label, state))


def _problems(operations: list[Any], app_label: str, state: ProjectState) -> Iterator[str]:
    for operation in operations:
        problem = None if _is_of_new_column(operation, operations) else _problem(operation, app_label, state)
        if problem:
            yield f"{operation.describe()}: {problem}"
        if isinstance(operation, migrations.SeparateDatabaseAndState):
            yield from _problems(operation.database_operations, app_label, state.clone())
        operation.state_forwards(app_label, state)


def _is_of_new_column(operation: Any, operations: list[Any]) -> bool:
    """Whether a unique constraint is on a column that the same migration adds: older code leaves it NULL."""
    if not isinstance(operation, migrations.AddConstraint):
        return False
    constraint = operation.constraint
    added = {
        one.name
        for one in operations
        if isinstance(one, migrations.AddField)
        and one.model_name == operation.model_name
        and one.field.null
        and not one.field.has_db_default()
    }
    return isinstance(constraint, models.UniqueConstraint) and bool(added & set(constraint.fields))


def _problem(operation: Any, app_label: str, state: ProjectState) -> str | None:
    match operation:
        case migrations.CreateModel() | migrations.AddIndex() | migrations.SeparateDatabaseAndState():
            return None
        case _ if isinstance(operation, STATE_ONLY):
            return None
        case migrations.AddField():
            return _added(operation.field)
        case migrations.AlterField():
            before = state.models[app_label, operation.model_name_lower].fields[operation.name]
            return None if _column(before) == _column(operation.field) else "older code writes the column as it was"
        case migrations.RunPython():
            return None if operation.reverse_code else "it cannot be taken back: give reverse_code (noop will do)"
        case migrations.AddConstraint():
            return "older code may write rows that break it"
        case migrations.RemoveIndex():
            return "older code names the index in its hints"
        case migrations.RunSQL():
            return "nobody can read from it what it does: use RunPython or the schema's operations"
        case _:
            return "older code uses what it takes away"


def _added(field: Any) -> str | None:
    if field.many_to_many or field.remote_field:
        return "the tables have no relations"
    if field.unique and (not field.null or field.has_db_default()):
        return "older code may write rows that break it"
    if not (field.null or field.has_db_default() or field.generated):
        return "older code inserts rows without it: give db_default or null=True"
    return None


def _column(field: models.Field[Any, Any]) -> tuple[str, list[Any], dict[str, Any]]:
    _, path, args, options = field.deconstruct()
    return path, list(args), {name: value for name, value in options.items() if name not in field.non_db_attrs}
