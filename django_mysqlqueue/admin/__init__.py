"""The dashboard in Django's admin.

Only ``django.contrib.admin`` imports this module, by autodiscovery.
"""

from __future__ import annotations

from django.contrib import admin

from django_mysqlqueue.admin.dashboard import DashboardAdmin
from django_mysqlqueue.models import Dashboard

admin.site.register(Dashboard, DashboardAdmin)
