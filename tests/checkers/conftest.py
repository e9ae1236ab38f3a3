"""The fixtures of the tests of check-backs; those of other folders name the plugin themselves."""

from tests.checkers.check_server import call, checks, serve, until
from tests.checkers.runner_harness import harness, owner, runner

__all__ = ["call", "checks", "harness", "owner", "runner", "serve", "until"]
