"""The dashboard and the record of operations.

The admin imports this module; without ``django.contrib.admin`` nobody does.
"""

from __future__ import annotations

from django.contrib import admin

from django_mysqlqueue.admin.audit_log import OperationAdmin
from django_mysqlqueue.admin.dashboard import DashboardAdmin
from django_mysqlqueue.models import Dashboard, Operation

admin.site.register(Dashboard, DashboardAdmin)
admin.site.register(Operation, OperationAdmin)
