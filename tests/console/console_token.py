"""The token of the tests, which fixtures and tests share."""

TOKEN = "a-token-of-the-tests"
