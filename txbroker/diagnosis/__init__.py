"""What can be wrong with an installation: one table for all who report it.

- `limits.py` has the limits.
- `overview.py` finds each condition in an overview.
- `table.py` has a row (`rows.py`) for each condition: its alert rules, title and next step.

The console, the history, `txbroker top` and the doctor read the table. `docs/diagnoses.py` makes
the alert rules, the heads of the runbooks and their index from it.
"""
