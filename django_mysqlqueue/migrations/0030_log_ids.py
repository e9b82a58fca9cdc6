import uuid
from typing import Any

from django.db import migrations, router

import django_mysqlqueue.fields


def identify(apps: Any, schema_editor: Any) -> None:
    """Every log has an id from here on."""
    alias = schema_editor.connection.alias
    log = apps.get_model('django_mysqlqueue', 'Sequencer')
    if router.allow_migrate_model(alias, log):
        log.objects.using(alias).get_or_create(pk=1)
        log.objects.using(alias).filter(log_id='').update(log_id=str(uuid.uuid4()))


class Migration(migrations.Migration):

    dependencies = [
        ('django_mysqlqueue', '0029_redriven_id'),
    ]

    operations = [
        migrations.AlterField(
            model_name='sequencer',
            name='log_id',
            field=django_mysqlqueue.fields.BytewiseCharField(blank=True, db_default='', help_text='identifies this log, also under another alias of its database', max_length=36, verbose_name='log id'),
        ),
        migrations.RunPython(identify, migrations.RunPython.noop),
    ]
