"""`txbroker doctor`: is everything well, and if not, what to do.

command.py   the command line
findings.py  what a check is and what it finds
checks_*.py  the checks themselves, small functions with a name
subject.py   what checks may ask: Kafka, the proxies, the settings
proxies.py   the proxies, over HTTP
runner.py    runs checks side by side, each within its time
report.py    shows what they found: table, JSON, Prometheus
bundle.py    packs everything for support, without secrets
"""
