"""`txbroker doctor`: diagnoses an installation, with a remedy for each problem.

command.py   the command line
findings.py  checks and their findings
checks_*.py  the checks, small functions
subject.py   the facts for checks: Kafka, the proxies, the settings
proxies.py   the proxies, over HTTP
runner.py    runs checks in parallel, each with a timeout
report.py    reports: text, JSON, Prometheus
bundle.py    packs an archive for support, without secrets
"""
