"""The pytest plugin: fixtures with which services test what they send through txbroker.

pytest imports this at every start, so it imports nothing but pytest until a fixture is used.
"""
