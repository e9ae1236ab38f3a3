"""Spark's daemon of Python workers, with the directories of zip archives cached between tasks.

Spark puts its jar and two zips on the workers' path, and its workers drop Python's import caches
before each task. Before Python 3.13 each task then reads all three directories again: 0.2 s of
processor time, measured. An archive that is added later has a separate path and is read when it is
first used; none is replaced while Spark runs.
"""

import zipimport
from typing import Any


def _keep(_importer: Any) -> None:
    """Keep the cached directory of an archive."""


if __name__ == "__main__":
    from pyspark import daemon

    importer: Any = zipimport.zipimporter
    importer.invalidate_caches = _keep
    daemon.manager()
