from pathlib import Path

from django.db import migrations, models

from django_mysqlqueue import migrations as ours

LAST = max(path.stem for folder in ours.__path__ for path in Path(folder).glob("[0-9]*.py"))


class Migration(migrations.Migration):
    dependencies = [("django_mysqlqueue", LAST)]
    operations = [
        migrations.AddField("sequencer", "later", models.BigIntegerField(db_default=0)),
    ]
