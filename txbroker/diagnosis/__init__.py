"""What can be wrong with an installation: one table for all who report it.

`table.py` has a row (`rows.py`) for each condition: where in an overview it is found
(`overview.py`), beyond which limit (`limits.py`), its alert rule, title and next step. The console,
the history, `txbroker top` and the doctor read it; `docs/diagnoses.py` makes the alert rules, the
heads of the runbooks and their index from it.
"""
