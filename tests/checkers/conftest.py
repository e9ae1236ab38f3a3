"""The fixtures of the tests of check-backs; those of other folders name the plugin themselves."""

from checks_world import call, checks, serve, until

__all__ = ["call", "checks", "serve", "until"]
