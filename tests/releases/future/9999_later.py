from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("django_mysqlqueue", "0024_schedules")]
    operations = [
        migrations.AddField("sequencer", "later", models.BigIntegerField(db_default=0)),
    ]
