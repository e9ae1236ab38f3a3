"""The fixtures of the tests of check-backs; those of other folders name the plugin themselves."""

from tests.checkers.check_server import call, checks, http, serve
from tests.checkers.runner_harness import harness

__all__ = ["call", "checks", "harness", "http", "serve"]
