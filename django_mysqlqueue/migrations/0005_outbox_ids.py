from typing import Any

from django.db import migrations, models

NAME = "queue_outbox_due"
BEFORE = ("deliver_at", "outbox_id")
AFTER = ("deliver_at", "outbox_id", "id")


def _replace(schema_editor: Any, columns: tuple[str, ...]) -> None:
    """One statement where the server can: subscribers name the index in their hints, so it must never be missing."""
    if schema_editor.connection.vendor == "mysql":
        schema_editor.execute(f"ALTER TABLE queue_outbox DROP INDEX {NAME}, ADD INDEX {NAME} ({', '.join(columns)})")
    else:
        schema_editor.execute(f"DROP INDEX {NAME}")
        schema_editor.execute(f"CREATE INDEX {NAME} ON queue_outbox ({', '.join(columns)})")


def forwards(apps: Any, schema_editor: Any) -> None:
    _replace(schema_editor, AFTER)


def backwards(apps: Any, schema_editor: Any) -> None:
    _replace(schema_editor, BEFORE)


class Migration(migrations.Migration):

    dependencies = [
        ('django_mysqlqueue', '0004_pipeline'),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.RunPython(forwards, backwards, hints={"model_name": "outboxmessage"})],
            state_operations=[
                migrations.RemoveIndex(model_name='outboxmessage', name=NAME),
                migrations.AddIndex(
                    model_name='outboxmessage',
                    index=models.Index(fields=['deliver_at', 'outbox_id', 'message_id'], name=NAME),
                ),
            ],
        ),
    ]
