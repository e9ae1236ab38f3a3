"""All checks, in the report's order."""

from txbroker.cli.doctor import (
    checks_access,
    checks_audit,
    checks_kafka,
    checks_proxies,
    checks_topics,
    checks_transactions,
)

CHECKS = (
    *checks_kafka.book.checks,
    *checks_topics.book.checks,
    *checks_proxies.proxies_book.checks,
    *checks_proxies.groups_book.checks,
    *checks_transactions.book.checks,
    *checks_transactions.kafka_book.checks,
    *checks_audit.book.checks,
    *checks_access.settings_book.checks,
    *checks_access.proxies_book.checks,
)
