"""Settings of the subscriber processes that the browser's tests start: the suite's, with handlers that break."""

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.browser"]
