from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("django_mysqlqueue", "0027_operation_progress")]
    operations = [
        migrations.AddField("sequencer", "later", models.BigIntegerField(db_default=0)),
    ]
