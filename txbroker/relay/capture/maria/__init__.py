"""MariaDB's binary log: statements, rows and values as text."""
