"""The Django app: its migration creates txbroker's tables. Add it to INSTALLED_APPS."""
