"""The fixtures of the tests of check-backs; those of other folders name the plugin themselves."""

from tests.checkers.checks_world import call, checks, serve, until
from tests.checkers.runner_world import owner, runner, world

__all__ = ["call", "checks", "owner", "runner", "serve", "until", "world"]
