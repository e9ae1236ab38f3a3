"""Which of these tests run."""

import os

# Minutes each: `make test-long` runs them.
collect_ignore = [] if os.environ.get("TXBROKER_TEST_LONG") else ["test_long_runs.py"]
