"""Sends the audit to a cluster that runs Spark's driver too (deploy mode `cluster`)."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from txbroker.errors import ConfigurationError
from txbroker.spark import connector
from txbroker.spark.session import (
    SparkSettings,
    launch_environment,
    log_conf,
    require_pyspark,
)

MASTERS = ("yarn", "k8s://")
"""Of the masters, those that run a driver in Python; a standalone one does not."""


def submit(settings: SparkSettings, script: Path, arguments: Sequence[str]) -> int:
    """Have a cluster run a Python script as Spark's driver, and wait for its end.

    Args:
        settings: `master` is where.
        script: the driver's file; what it imports must be installed in the cluster.
        arguments: of the script.

    Returns the exit code of `spark-submit`: 0 where the cluster says that all went well.

    Raises:
        ConfigurationError: pyspark or Java are missing, or the master runs no driver.
    """
    require_pyspark()
    import pyspark

    if not settings.master.startswith(MASTERS):
        raise ConfigurationError(
            f"--deploy-mode cluster needs --master yarn or k8s://URL: {settings.master or 'local'} "
            "runs no driver in Python"
        )
    home = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)
    folder = Path(tempfile.mkdtemp(prefix="txbroker-spark-"))
    try:
        conf = {
            **connector.ivy_conf(pyspark.__version__, folder),
            "spark.app.name": "txbroker audit",
            **settings.conf,
        }
        options = [f"--conf={name}={value}" for name, value in conf.items()]
        command = [str(home / "bin" / "spark-submit"), "--master", settings.master]
        command += ["--deploy-mode", "cluster", *options, str(script), *arguments]
        environment = dict(os.environ)
        for name, value in launch_environment(settings.master).items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        environment["SPARK_SUBMIT_OPTS"] = " ".join(
            (os.environ.get("SPARK_SUBMIT_OPTS", ""), log_conf(settings.verbose, folder))
        ).strip()
        return subprocess.run(command, env=environment, check=False).returncode
    finally:
        shutil.rmtree(folder, ignore_errors=True)
