"""`txbroker doctor`: diagnoses an installation, with a remedy for each problem.

command.py   the command line
findings.py  checks and their findings
checks_*.py  the checks, small functions
subject.py   the facts for checks: Kafka, the proxies over HTTP, the settings
report.py    runs checks in parallel, each with a timeout; reports as text, JSON, Prometheus
bundle.py    packs an archive for support, without secrets
"""
