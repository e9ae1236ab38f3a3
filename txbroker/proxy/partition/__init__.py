"""One half partition: its logs, calls, promotion and checks."""
