from django.apps import AppConfig


class TestsAppConfig(AppConfig):
    name = "tests.app"
    label = "tests_app"
