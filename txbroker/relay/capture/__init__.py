"""Change capture: rows that committed transactions changed become messages."""
