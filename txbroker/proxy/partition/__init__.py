"""One half partition: its logs, what it answers, its turns and its checks."""
