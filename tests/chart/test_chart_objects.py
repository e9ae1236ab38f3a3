"""What helm makes of the chart is what Kubernetes takes, and what txbroker understands."""

from __future__ import annotations

import configparser
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from aiohttp.test_utils import make_mocked_request

import txbroker
from tests.chart.chart_pods import (
    POD,
    POD_IP,
    SECRET,
    Helm,
    Object,
    Render,
    called,
    environment,
    expanded,
    of_kind,
    one,
    pod_of,
    pods,
    settings_of,
)
from tests.chart.chart_values import EVERYTHING, SETS
from txbroker.checkers.group_secrets import GroupSecrets
from txbroker.cli import signals
from txbroker.cli.proxy import workers
from txbroker.config.settings import CONFIG_VARIABLE, ENV_PREFIX, Settings
from txbroker.embedded.jars import REPOSITORY_SETTING
from txbroker.errors import Forbidden
from txbroker.proxy.http.api import OPERATIONS
from txbroker.proxy.http.guards import Guard

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/txbroker"
OPERATORS = {"ServiceMonitor", "PrometheusRule"}
"""Kinds of the Prometheus Operator, of which Kubernetes has no schema."""
RUNBOOKS_URL = yaml.safe_load((CHART / "values.yaml").read_text())["prometheusRule"]["runbooksUrl"]
HANDING_OVER_S = 15
FILES = {"TXBROKER_CA_FILE", "TXBROKER_CLIENT_CERT_FILE", "TXBROKER_CLIENT_KEY_FILE"}
"""Variables of the commands that call a proxy."""
OLDEST, NEWEST = "1.27", kubernetes_validate.latest_version()


pytestmark = pytest.mark.needs_tool("helm")
every_set = pytest.mark.parametrize("name", SETS)


@pytest.fixture(scope="module")
def everything(render: Render) -> list[Object]:
    return render(EVERYTHING)


@every_set
def test_helm_lint_passes(helm: Helm, name: str) -> None:
    code, output = helm("lint", "--strict", str(CHART), values=SETS[name])
    assert code == 0, output
    assert "[WARNING]" not in output


@every_set
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_knows_every_field(render: Render, name: str, version: str) -> None:
    for found in render(SETS[name]):
        if found["kind"] in OPERATORS:
            assert found["apiVersion"] == "monitoring.coreos.com/v1"
        else:
            kubernetes_validate.validate(found, version, strict=True)


def test_a_field_that_kubernetes_does_not_know_is_found(render: Render) -> None:
    service = one(render({}), "Service", "-peers")
    spec = {**service["spec"], "clusterIp": "None"}
    with pytest.raises(kubernetes_validate.ValidationError, match="clusterIp"):
        kubernetes_validate.validate({**service, "spec": spec}, NEWEST, strict=True)


def test_optional_objects_are_off_by_default(render: Render) -> None:
    always = {"StatefulSet", "Service", "ConfigMap", "Job", "PodDisruptionBudget", "ServiceAccount"}
    always |= {"Pod"}  # of `helm test`
    more = {"NetworkPolicy", "CronJob", "PersistentVolumeClaim", "Ingress", *OPERATORS}
    assert {found["kind"] for found in render({})} == always
    assert {found["kind"] for found in render(EVERYTHING)} == always | more
    spare = {found["kind"] for found in render(SETS["spare"])}
    assert spare == {"StatefulSet", "Service", "ConfigMap", "NetworkPolicy", "CronJob", "Pod"}


@every_set
def test_names_stay_in_one_namespace_and_are_unique(render: Render, name: str) -> None:
    names = [(found["kind"], found["metadata"]["name"]) for found in render(SETS[name])]
    assert len(set(names)) == len(names)
    assert all(len(text) <= 52 for _, text in names)


def test_a_long_name_of_a_release_is_cut(helm: Helm) -> None:
    code, output = helm(
        "template", "a" * 53, str(CHART), "--kube-version", "1.31.0", values=SETS["everything"]
    )
    assert code == 0, output
    names = {found["metadata"]["name"] for found in yaml.safe_load_all(output) if found}
    # A CronJob adds 11 characters to its name, of 63; a StatefulSet a hash to a label.
    assert max(map(len, names)) <= 52


# --- security --------------------------------------------------------------------------------


@every_set
def test_every_pod_is_restricted(render: Render, name: str) -> None:
    found = list(pods(render(SETS[name])))
    assert found
    for pod in found:
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec)
        assert {"requests", "limits"} == set(pod.container["resources"])
        kinds = {kind for volume in pod.spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "projected"}
        assert all("sizeLimit" in v["emptyDir"] for v in pod.spec["volumes"] if "emptyDir" in v)


@every_set
def test_kubernetes_adds_no_variables_that_look_like_settings(render: Render, name: str) -> None:
    for pod in pods(render(SETS[name])):
        assert pod.spec["enableServiceLinks"] is False


@every_set
def test_secrets_are_only_referred_to(render: Render, name: str) -> None:
    objects = render(SETS[name])
    assert of_kind(objects, "Secret") == []
    for pod in pods(objects):
        for mount in pod.container["volumeMounts"]:
            assert "subPath" not in mount  # changes would not arrive
        for volume in pod.spec["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440
                assert ("items" in volume["secret"]) is (volume["name"] != "groups")


def test_only_proxies_and_the_test_are_given_the_token(everything: list[Object]) -> None:
    with_token = [
        pod.owner["kind"]
        for pod in pods(everything)
        for volume in pod.spec["volumes"]
        if volume.get("secret", {}).get("secretName") == "our-token"
    ]
    assert sorted(with_token) == ["Pod", "StatefulSet"]


def test_only_proxies_find_the_secrets_of_groups(everything: list[Object]) -> None:
    mounts = [
        (pod.owner["kind"], mount["mountPath"])
        for pod in pods(everything)
        for volume in pod.spec["volumes"]
        for mount in pod.container["volumeMounts"]
        if volume.get("secret", {}).get("secretName") == "group-secrets"
        and mount["name"] == volume["name"]
    ]
    ((kind, path),) = mounts
    assert kind == "StatefulSet"
    variables = environment(pod_of(everything, "StatefulSet"))
    operators = (ROOT / "docs/operate/kubernetes.md").read_text()
    assert f"--secret-ref file:{path}/NAME" in operators
    secrets = GroupSecrets(Path(variables["TXBROKER_SECRETS_DIR"]))
    assert secrets.refuse("orders", f"file:{path}/orders") is None


def test_everything_that_is_written_has_a_volume(everything: list[Object]) -> None:
    for pod in pods(everything):
        writable = {
            mount["mountPath"]
            for mount in pod.container["volumeMounts"]
            if not mount.get("readOnly")
        }
        audit = pod.owner["kind"] == "CronJob"
        assert writable == ({"/tmp", "/var/lib/txbroker"} if audit else {"/tmp"})


# --- what txbroker makes of it ---------------------------------------------------------------


@every_set
def test_every_option_and_variable_is_txbrokers(render: Render, name: str) -> None:
    for pod in pods(render(SETS[name])):
        command, context = called(pod)
        assert command in ("proxy", "topics apply", "audit run", "doctor")
        context.close()
        of_commands = {CONFIG_VARIABLE, REPOSITORY_SETTING, "TXBROKER_URL", *FILES}
        known = {ENV_PREFIX + field.upper() for field in Settings.model_fields} | of_commands
        others = {"POD_NAME", "POD_IP", "XDG_CACHE_HOME", "HTTPS_PROXY"}
        assert set(environment(pod)) - known <= others


def secret_of(settings: Settings) -> str:
    """Return the secret with which settings log in to Kafka."""
    if settings.kafka_sasl_mechanism != "OAUTHBEARER":
        assert settings.kafka_sasl_username in ("of a secret", "txbroker")
        return settings.kafka_secret("kafka_sasl_password")
    if settings.kafka_oauth_token_file is not None:
        return settings.kafka_oauth_token_file.read_text()
    return settings.kafka_secret("kafka_oauth_client_secret")


@every_set
def test_every_pod_starts_with_settings_that_hold(
    render: Render, name: str, tmp_path: Path
) -> None:
    objects = render(SETS[name])
    for number, pod in enumerate(pods(objects)):
        settings = settings_of(pod, objects, tmp_path / str(number))
        expected = SETS[name].get("kafka", {})
        assert settings.kafka == expected.get("bootstrapServers", "kafka:9092")
        assert settings.kafka_security_protocol == expected.get("securityProtocol", "PLAINTEXT")
        for setting, value in SETS[name].get("settings", {}).items():
            assert getattr(settings, setting) == value
        if settings.kafka_security_protocol.startswith("SASL"):
            assert secret_of(settings).startswith(SECRET)


@every_set
def test_a_proxy_advertises_its_own_name_and_answers_to_it(
    render: Render, name: str, tmp_path: Path
) -> None:
    objects = render(SETS[name])
    pod = pod_of(objects, "StatefulSet")
    spec = pod.owner["spec"]
    peers = next(s for s in of_kind(objects, "Service") if s["spec"].get("clusterIP") == "None")
    service = next(s for s in of_kind(objects, "Service") if s is not peers)
    assert spec["serviceName"] == peers["metadata"]["name"]
    settings = settings_of(pod, objects, tmp_path)
    own = f"{POD}.{peers['metadata']['name']}.pay.svc.cluster.local"
    assert settings.instance == POD
    scheme = "https" if "tls" in SETS[name] else "http"
    assert settings.advertise_url == f"{scheme}://{own}:8470"
    assert settings.listen_address.port == 8470
    # No handshake comes with these requests, so no certificate.
    guard = Guard(settings.model_copy(update={"tls_client_ca_file": None}))
    short = f"{POD}.{peers['metadata']['name']}"
    plain = service["metadata"]["name"]
    for host in (own, short, plain, f"{plain}.pay", f"{plain}.pay.svc", "10.1.2.3", "localhost"):
        guard.admit_page(make_mocked_request("GET", "/", headers={"Host": f"{host}:8470"}))
    for host in ("evil.example.org", f"{plain}.other"):
        with pytest.raises(Forbidden):
            guard.admit_page(make_mocked_request("GET", "/", headers={"Host": host}))
    outside = SETS[name].get("ingress", {}).get("hosts", [])
    for host in SETS[name].get("allowedHosts", []) + outside:
        guard.admit_page(make_mocked_request("GET", "/", headers={"Host": host}))


@every_set
def test_commands_in_the_pod_find_the_proxy(render: Render, name: str, tmp_path: Path) -> None:
    objects = render(SETS[name])
    pod = pod_of(objects, "StatefulSet")
    # A socket on [::] takes no calls for 127.0.0.1.
    loopback = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
    settings = settings_of(pod, objects, tmp_path)
    address = settings.admin_address or settings.listen_address
    expected = f"http://{loopback[address.host]}:{address.port}"
    if settings.secure:  # the certificate is for names
        expected = f"{settings.advertise.rpartition(':')[0]}:{address.port}"
    assert environment(pod)["TXBROKER_URL"] == expected


def test_large_numbers_are_written_as_they_were_given(everything: list[Object]) -> None:
    text = one(everything, "ConfigMap", "shop-txbroker")["data"]["txbroker.toml"]
    lines = text.splitlines()
    for line in ("bodies_bytes_max = 268435456", "half_retention_s = 1209600", "partitions = 8"):
        assert line in lines
    assert {"check_after_s = 2.5", "create_target_topics = true", 'log_format = "json"'} <= {*lines}


def test_token_is_required_by_default(render: Render, tmp_path: Path) -> None:
    for name, number in (("defaults", 1), ("spare", 2)):
        objects = render(SETS[name])
        settings = settings_of(pod_of(objects, "StatefulSet"), objects, tmp_path / str(number))
        assert (settings.token_file is None) is settings.insecure is (name == "spare")


# --- proxies ---------------------------------------------------------------------------------


def test_each_probe_asks_what_it_means(render: Render) -> None:
    proxy = pod_of(render({}), "StatefulSet").container
    paths = {probe: proxy[f"{probe}Probe"]["httpGet"]["path"] for probe in ("liveness", "startup")}
    # Neither a Kafka that is down nor a partition that is read again is mended by a restart.
    assert paths == {"liveness": "/healthz", "startup": "/healthz"}
    assert proxy["readinessProbe"]["httpGet"]["path"] == "/readyz"
    unguarded = {operation.path for operation in OPERATIONS if operation.open}
    assert {"/healthz", "/readyz"} <= unguarded
    ports = {port["name"] for port in proxy["ports"]}
    assert {proxy[f"{p}Probe"]["httpGet"]["port"] for p in ("liveness", "readiness")} <= ports


@every_set
def test_a_proxy_has_the_time_to_hand_over(render: Render, name: str) -> None:
    pod = pod_of(render(SETS[name]), "StatefulSet")
    hook = pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    delay_s = 0 if hook is None else int(hook[1])
    assert pod.spec["terminationGracePeriodSeconds"] >= delay_s + HANDING_OVER_S
    assert (hook is None) is (name == "spare")


def test_proxies_start_without_waiting_for_each_other(render: Render) -> None:
    objects = render({})
    assert one(objects, "StatefulSet")["spec"]["podManagementPolicy"] == "Parallel"
    assert one(objects, "Service", "-peers")["spec"]["publishNotReadyAddresses"] is True
    plain = next(s for s in of_kind(objects, "Service") if "clusterIP" not in s["spec"])
    assert "publishNotReadyAddresses" not in plain["spec"]


@every_set
def test_only_proxies_are_selected(render: Render, name: str) -> None:
    objects = render(SETS[name])
    selectors: list[dict[str, str]] = [s["spec"]["selector"] for s in of_kind(objects, "Service")]
    for kind in ("StatefulSet", "PodDisruptionBudget"):
        selectors += [o["spec"]["selector"]["matchLabels"] for o in of_kind(objects, kind)]
    policies = of_kind(objects, "NetworkPolicy")
    selectors += [o["spec"]["podSelector"]["matchLabels"] for o in policies]
    assert len(selectors) >= 3
    for selector in selectors:
        chosen = [p.owner["kind"] for p in pods(objects) if selector.items() <= p.labels.items()]
        assert chosen == ["StatefulSet"]


def test_more_proxies_restart_none_and_other_settings_all(render: Render) -> None:
    def template(values: dict[str, Any]) -> Any:
        return one(render(values), "StatefulSet")["spec"]["template"]

    assert template({"replicas": 5}) == template({})
    assert template({"settings": {"check_after_s": 7}}) != template({})


def test_the_network_policy_lets_in_whom_it_names(everything: list[Object]) -> None:
    policy = one(everything, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    of_test, ingress = policy["ingress"]
    (tester,) = (pod.labels for pod in pods(everything) if pod.owner["kind"] == "Pod")
    assert of_test["from"][0]["podSelector"]["matchLabels"].items() <= tester.items()
    assert of_test["ports"] == ingress["ports"]
    own, *others = ingress["from"]
    assert own["podSelector"]["matchLabels"] == policy["podSelector"]["matchLabels"]
    named = EVERYTHING["networkPolicy"]
    assert others == named["clients"] + named["prometheus"]
    dns, peers, *more = policy["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    assert peers["to"] == [own]
    assert more == named["egress"]


def test_without_clients_the_namespace_may_call(render: Render) -> None:
    policy = one(render(SETS["spare"]), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"][1]["from"][1:] == [{"podSelector": {}}]


# --- reached from outside, extended, tried ---------------------------------------------------


@pytest.mark.parametrize(
    ("name", "service", "host"),
    [
        ("everything", "shop-txbroker", "shop.example.org"),
        ("secured", "shop-txbroker-admin", "operators.example.org"),
    ],
)
def test_an_ingress_leads_to_a_service(render: Render, name: str, service: str, host: str) -> None:
    objects = render(SETS[name])
    (rule,) = one(objects, "Ingress")["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert (rule["host"], backend["name"]) == (host, service)
    ports = one(objects, "Service", service)["spec"]["ports"]
    assert backend["port"]["name"] in {port["name"] for port in ports}


def test_every_container_has_the_further_variables_and_volumes(everything: list[Object]) -> None:
    for pod in pods(everything):
        assert environment(pod)["HTTPS_PROXY"] == EVERYTHING["extraEnv"][0]["value"]
        assert EVERYTHING["extraVolumes"][0] in pod.spec["volumes"]
        assert EVERYTHING["extraVolumeMounts"][0] in pod.container["volumeMounts"]


@every_set
def test_helm_test_calls_the_doctor_as_an_operator(
    render: Render, name: str, tmp_path: Path
) -> None:
    objects = render(SETS[name])
    pod = pod_of(objects, "Pod")
    assert pod.owner["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert called(pod)[0] == "doctor"
    variables = environment(pod)
    host, port = variables["TXBROKER_URL"].rpartition("//")[2].split(":")
    service = next(
        s for s in of_kind(objects, "Service") if host.startswith(s["metadata"]["name"] + ".pay.")
    )
    assert int(port) in {each["port"] for each in service["spec"]["ports"]}
    settings = settings_of(pod_of(objects, "StatefulSet"), objects, tmp_path / "proxy")
    assert int(port) == (settings.admin_address or settings.listen_address).port
    guarded = settings.token_file or settings.admin_token_file or settings.principals_file
    assert ("TXBROKER_TOKEN_FILE" in variables) is (guarded is not None)
    settings_of(pod, objects, tmp_path / "test")
    files = [value for key, value in variables.items() if key.endswith("_FILE")]
    assert [path for path in files if not (tmp_path / "test" / path[1:]).exists()] == []


# --- topics, audit ---------------------------------------------------------------------------


def test_topics_are_made_before_proxies_start(everything: list[Object]) -> None:
    job = one(everything, "Job")
    (config,) = (
        m
        for m in of_kind(everything, "ConfigMap")
        if "helm.sh/hook" in m["metadata"].get("annotations", {})
    )
    for hook in (job, config):
        assert hook["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    weights = [int(o["metadata"]["annotations"]["helm.sh/hook-weight"]) for o in (config, job)]
    assert weights == sorted(set(weights))
    pod = pod_of(everything, "Job")
    assert pod.container["args"] == ["topics", "apply", "--yes"]
    assert pod.spec["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
    # Nothing of the release is there yet.
    assert pod.spec["serviceAccountName"] == "default"
    plain = one(everything, "ConfigMap", "shop-txbroker")
    assert config["data"] == plain["data"]


def test_audit_keeps_state_for_the_next_run(everything: list[Object]) -> None:
    cron = one(everything, "CronJob")["spec"]
    assert cron["concurrencyPolicy"] == "Forbid"
    assert cron["jobTemplate"]["spec"]["backoffLimit"] == 0
    pod = pod_of(everything, "CronJob")
    claim = one(everything, "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    (data,) = (v for v in pod.spec["volumes"] if "persistentVolumeClaim" in v)
    assert data["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (mount,) = (m for m in pod.container["volumeMounts"] if m["name"] == data["name"])
    _, context = called(pod)
    assert str(context.params["data_dir"]) == mount["mountPath"]
    assert environment(pod)["XDG_CACHE_HOME"].startswith(mount["mountPath"] + "/")
    assert pod.container["workingDir"] == "/tmp"  # Spark writes there
    assert context.params["business"] == "parquet:s3a://warehouse/orders"
    assert set(context.params["conf"]) == {"spark.local.dir=/tmp", "spark.driver.memory=2g"}
    assert (context.params["late_after_s"], context.params["lost_after_s"]) == (60, 600)


def test_an_existing_claim_is_used(render: Render) -> None:
    objects = render(SETS["spare"])
    assert of_kind(objects, "PersistentVolumeClaim") == []
    volumes = pod_of(objects, "CronJob").spec["volumes"]
    assert {"claimName": "runs"} in [v.get("persistentVolumeClaim") for v in volumes]


def test_executors_are_pods_that_only_the_audit_makes(render: Render) -> None:
    objects = render(SETS["executors"])
    pod = pod_of(objects, "CronJob")
    _, context = called(pod)
    conf = dict(text.split("=", 1) for text in context.params["conf"])
    assert context.params["master"] == "k8s://https://kubernetes.default.svc"
    assert conf["spark.kubernetes.container.image"] == pod.container["image"]
    assert conf["spark.kubernetes.driver.pod.name"] == POD
    assert conf["spark.driver.host"] == POD_IP
    assert (conf["spark.executor.instances"], conf["spark.executor.memory"]) == ("3", "4g")
    mounts = {mount["name"]: mount["mountPath"] for mount in pod.container["volumeMounts"]}
    for name in ("oauthTokenFile", "caCertFile"):
        assert conf[f"spark.kubernetes.authenticate.{name}"].startswith(mounts["api-token"] + "/")
    folder, _, file = conf["spark.kubernetes.executor.podTemplateFile"].rpartition("/")
    assert folder == mounts["executors"]
    template = yaml.safe_load(one(objects, "ConfigMap", "-audit")["data"][file])
    (container,) = template["spec"]["containers"]
    assert container["name"] == conf["spark.kubernetes.executor.podTemplateContainerName"]
    # Spark names the image.
    whole = {**container, "image": "x"}
    template["metadata"]["name"] = "x"
    template["spec"]["containers"] = [whole]
    for version in (OLDEST, NEWEST):
        kubernetes_validate.validate(template, version, strict=True)
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    (subject,) = one(objects, "RoleBinding")["subjects"]
    assert (
        subject["name"]
        == pod.spec["serviceAccountName"]
        == one(objects, "Role")["metadata"]["name"]
    )
    others = {other.spec["serviceAccountName"] for other in pods(objects) if other != pod}
    assert subject["name"] not in others


# --- watching --------------------------------------------------------------------------------


def test_the_rules_are_those_that_were_tried(everything: list[Object]) -> None:
    text = (CHART / "files/alerts.yaml").read_text()
    assert text.count(RUNBOOKS_URL) == text.count("runbook_url: ")
    expected = yaml.safe_load(text.replace(RUNBOOKS_URL, "https://example.org/runbooks/"))
    assert one(everything, "PrometheusRule")["spec"] == expected
    assert "https://example.org/runbooks/TxBrokerParking.md" in str(expected)


def test_the_dashboard_is_the_one_that_was_made(everything: list[Object]) -> None:
    found = one(everything, "ConfigMap", "-dashboard")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    made = json.loads((CHART / "files/dashboard.json").read_text())
    assert json.loads(found["data"]["txbroker.json"]) == made


def test_prometheus_reads_those_too_that_are_not_ready(everything: list[Object]) -> None:
    monitor = one(everything, "ServiceMonitor")
    expected = monitor["spec"]["selector"]["matchLabels"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (service,) = (
        s
        for s in of_kind(everything, "Service")
        if expected.items() <= s["metadata"]["labels"].items()
    )
    assert service["spec"]["publishNotReadyAddresses"] is True
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["path"] in {operation.path for operation in OPERATIONS}
    assert endpoint["authorization"]["credentials"] == {"name": "our-token", "key": "bearer"}


def test_without_a_token_prometheus_brings_none(render: Render) -> None:
    values = {**SETS["spare"], "serviceMonitor": {"enabled": True}}
    (endpoint,) = one(render(values), "ServiceMonitor")["spec"]["endpoints"]
    assert "authorization" not in endpoint


def test_probes_leave_time_to_replace_the_first_worker(render: Render) -> None:
    pod = pod_of(render(SETS["workers"]), "StatefulSet").container
    startup, liveness = pod["startupProbe"], pod["livenessProbe"]
    start_s = workers.FIRST_BEAT_MAX * signals.BEAT_S
    assert startup["failureThreshold"] * startup["periodSeconds"] == start_s
    hanging_s = workers.BEATS_MISSED_MAX * signals.BEAT_S + workers.STACKS_S
    away_s = hanging_s + workers.PAUSE_MAX_S + start_s
    assert (liveness["failureThreshold"] - 1) * liveness["periodSeconds"] > away_s
    alone = pod_of(render({}), "StatefulSet").container["livenessProbe"]
    assert alone["failureThreshold"] * alone["periodSeconds"] == 30


def test_every_worker_of_a_pod_is_reached(render: Render, tmp_path: Path) -> None:
    objects = render(SETS["workers"])
    pod = pod_of(objects, "StatefulSet")
    ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
    given = settings_of(pod, objects, tmp_path)
    assert given.workers == 3
    listened = set()
    for number in range(1, 4):
        worker = given.of_worker(number)
        for address in (worker.listen_address, worker.admin_address, worker.peer_address):
            assert address is not None
            listened.add(address.port)
    assert set(ports.values()) == listened
    peers = one(objects, "Service", "-peers")["spec"]["ports"]
    assert {port["name"]: port["port"] for port in peers} == ports
    policy = one(objects, "NetworkPolicy")["spec"]
    admitted = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    among = {port["port"] for rule in policy["egress"] for port in rule["ports"]}
    assert admitted == set(ports) <= among
    endpoints = one(objects, "ServiceMonitor")["spec"]["endpoints"]
    assert [ports[each["port"]] for each in endpoints] == [8480, 8481, 8482]


# --- the package -----------------------------------------------------------------------------


def test_the_chart_is_of_this_version() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == txbroker.__version__
    assert "dependencies" not in about
    parts = configparser.ConfigParser()
    parts.read(ROOT / "setup.cfg")
    urls = dict(re.findall(r"^(\w+) = (\S+)$", parts["metadata"]["project_urls"], re.M))
    assert [about["home"], *about["sources"]] == [urls["Homepage"], urls["Source"]]
    assert about["maintainers"]
    in_repository = {
        "icon": about["icon"].removeprefix(f"{urls['Source']}/raw/main/"),
        "runbooks": RUNBOOKS_URL.removeprefix(f"{urls['Source']}/blob/main/"),
        **{name: url.removeprefix(f"{urls['Source']}/blob/main/") for name, url in urls.items()},
    }
    for name in ("Homepage", "Source", "Issues"):
        del in_repository[name]
    assert [path for path in in_repository.values() if not (ROOT / path).exists()] == []


def test_a_package_holds_what_is_rendered_and_no_tests(helm: Helm, tmp_path: Path) -> None:
    code, output = helm("package", str(CHART), "--destination", str(tmp_path))
    assert code == 0, output
    (path,) = tmp_path.glob("*.tgz")
    with tarfile.open(path) as package:
        names = {name.partition("/")[2] for name in package.getnames()}
    assert {"files/alerts.yaml", "files/dashboard.json", "values.schema.json"} <= names
    assert "files/alerts_test.yaml" not in names


def test_hosts_are_filled_in_where_kubernetes_does(render: Render) -> None:
    """Kubernetes fills `$(NAME)` in only with variables that stand before."""
    variables = environment(pod_of(render({}), "StatefulSet"))
    assert "$(" not in expanded(variables["TXBROKER_ALLOWED_HOSTS"], variables)
