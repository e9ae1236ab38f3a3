"""The settings of a proxy, checked as a whole before anything starts."""
