"""How hard the core is fuzzed: quickly by default, `TXBROKER_FUZZ=5000` for a long run."""

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("TXBROKER_FUZZ", "0"))

fuzz = settings(
    max_examples=EXAMPLES or 60,
    stateful_step_count=60 if EXAMPLES else 30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
