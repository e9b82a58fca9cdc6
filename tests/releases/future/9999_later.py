from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("django_mysqlqueue", "0023_job_stages")]
    operations = [
        migrations.AddField("sequencer", "later", models.BigIntegerField(db_default=0)),
    ]
