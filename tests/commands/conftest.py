"""Fixtures that the tests of tools share with those of the plugin."""

from tests.plugin.conftest import task  # noqa: F401
