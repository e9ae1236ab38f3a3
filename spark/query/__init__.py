"""The tables of audits in SQL."""
