from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('django_mysqlqueue', '0005_outbox_ids'),
    ]

    operations = [
        migrations.AddField(
            model_name='consumergroup',
            name='sought_at',
            field=models.BigIntegerField(db_default=0, help_text='when its last seek began or ended; 0: never', verbose_name='sought at'),
        ),
    ]
