"""A client of the dashboard."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client


@pytest.fixture
def make_client(db, settings):
    settings.ROOT_URLCONF = "tests.support.dashboard"
    User.objects.all().delete()

    def make(*permissions, superuser=False, staff=True):
        number = User.objects.count()
        user = User.objects.create_user(f"ada{number}", is_staff=staff, is_superuser=superuser)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        assert user.user_permissions.count() == len(permissions)
        client = Client()
        client.force_login(user)
        return client

    return make


@pytest.fixture
def client(make_client):
    return make_client(superuser=True)
