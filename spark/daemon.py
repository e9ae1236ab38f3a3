"""Spark's daemon of Python workers, with the directories of archives kept between tasks.

Spark puts its jar and two zips on the workers' path, and its workers forget before each task what
they know of the path. Before Python 3.13 each of them then reads all three directories at once:
measured, 0.2 s of processor time for each task. An archive that comes later has a path of its own
and is read when it is first looked into; none is replaced while Spark runs.
"""

import zipimport
from typing import Any


def _keep(_importer: Any) -> None:
    """Keep what is known of an archive."""


if __name__ == "__main__":
    from pyspark import daemon

    importer: Any = zipimport.zipimporter
    importer.invalidate_caches = _keep
    daemon.manager()  # type: ignore[no-untyped-call]
