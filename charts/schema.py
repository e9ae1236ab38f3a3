"""The schema of the chart's values: what each may be, and that there are no others.

`python charts/schema.py > charts/txbroker/values.schema.json` renews it; a test asserts that it is
current, and that `values.yaml` has the same values. What stands below `settings` is made from
txbroker's own settings.
"""

from __future__ import annotations

import json
from typing import Any

from txbroker.config.settings import WORKERS_MAX, Settings

Json = dict[str, Any]

MADE_HERE = frozenset(
    {
        "listen", "advertise", "data_dir", "instance", "allowed_hosts", "token_file", "insecure",
        "principals_file", "peer_secret_file", "peer_names", "peer_listen", "peer_advertise",
        "admin_listen", "admin_token_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file",
        "peers_ca_file", "secrets_dir", "workers",
    }
)  # fmt: skip
"""Settings that templates make from other values; so are all that begin with `kafka`."""

TEXT: Json = {"type": "string"}
NAME: Json = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"}
NAME_OR_NONE: Json = {"type": "string", "pattern": r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$"}
KEY: Json = {"type": "string", "pattern": r"^[-._a-zA-Z0-9]{1,253}$"}
KEY_OR_NONE: Json = {"type": "string", "pattern": r"^[-._a-zA-Z0-9]{0,253}$"}
PATTERN_OF_NAMES: Json = {"type": "string", "pattern": r"^[^\s,]+$"}
SIZE: Json = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([EPTGMk]i?|m)?$"}
DURATION: Json = {"type": "string", "pattern": r"^([0-9]+(ms|[smhd]))+$"}
TRUTH: Json = {"type": "boolean"}
NUMBER_OF_USER: Json = {"type": ["integer", "null"], "minimum": 1, "maximum": 2**31 - 1}
TEXTS: Json = {"type": "object", "additionalProperties": TEXT}
VARIABLES: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {
                "type": "string",
                "not": {"pattern": "^(TXBROKER_|POD_NAME$|POD_IP$|XDG_CACHE_HOME$)"},
            }
        },
    },
}
"""Variables of Kubernetes', but for those that templates make."""
LIST_OF_OBJECTS: Json = {"type": "array", "items": {"type": "object"}}
OBJECT_OF_KUBERNETES: Json = {"type": "object"}
PULL: Json = {"type": "string", "enum": ["Always", "IfNotPresent", "Never"]}
SECONDS: Json = {"type": "number", "exclusiveMinimum": 0}


def count(least: int, most: int | None = None) -> Json:
    """Return the schema of a whole number."""
    return {"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most})


PORT_OR_NONE: Json = {"anyOf": [{"const": 0}, count(1024, 65535)]}


def closed(**properties: Json) -> Json:
    """Return the schema of an object that has these properties and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def choice(setting: str) -> Json:
    """Return the schema of one of the values that a setting of txbroker's may have."""
    return {"type": "string", "enum": Settings.model_json_schema()["properties"][setting]["enum"]}


def image() -> Json:
    """Return the schema of an image."""
    return closed(repository={"type": "string", "minLength": 1}, tag=TEXT, pullPolicy=PULL)


def resources() -> Json:
    """Return the schema of what a container may take."""
    amounts = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
    return closed(requests=amounts, limits=amounts)


def settings() -> Json:
    """Return the schema of txbroker's own settings, those left out that the chart makes."""
    properties = {
        name: {key: value for key, value in schema.items() if key not in ("default", "title")}
        # The model's schema keeps the line breaks of the docstrings.
        | {"description": Settings.model_fields[name].description}
        for name, schema in Settings.model_json_schema()["properties"].items()
        if name not in MADE_HERE and not name.startswith("kafka")
    }
    return closed(**properties)


def kafka() -> Json:
    """Return the schema of how Kafka is reached."""
    return closed(
        bootstrapServers={"type": "string", "pattern": r"^[^\s,]+:[0-9]+(,[^\s,]+:[0-9]+)*$"},
        securityProtocol=choice("kafka_security_protocol"),
        sasl=closed(
            mechanism=choice("kafka_sasl_mechanism"),
            username=TEXT,
            existingSecret=NAME_OR_NONE,
            passwordKey=KEY,
            usernameKey=KEY_OR_NONE,
        ),
        oauth=closed(
            tokenUrl={"type": "string", "pattern": r"^(https://[^\s?#@]+)?$"},
            clientId=TEXT,
            scope=TEXT,
            clientSecretKey=KEY,
            caSecret=NAME_OR_NONE,
            caKey=KEY,
            tokenKey=KEY_OR_NONE,
            audience=TEXT,
            expirationSeconds=count(600, 86400),
        ),
        tls=closed(
            caSecret=NAME_OR_NONE,
            caKey=KEY,
            clientSecret=NAME_OR_NONE,
            certKey=KEY,
            keyKey=KEY,
            keyPasswordKey=KEY_OR_NONE,
        ),
    )


def proxies() -> dict[str, Json]:
    """Return the schemas of the values that are about the proxies themselves."""
    return {
        "replicas": count(1, 100),
        "workers": count(1, WORKERS_MAX),
        "image": image(),
        "imagePullSecrets": {"type": "array", "items": NAME},
        "port": count(1024, 65535),
        "listenHost": {"type": "string", "enum": ["0.0.0.0", "[::]"]},
        "clusterDomain": NAME,
        "stop": closed(delaySeconds=count(0, 600), graceSeconds=count(20, 3600)),
        "resources": resources(),
        "podAnnotations": TEXTS,
        "podLabels": TEXTS,
        "nodeSelector": TEXTS,
        "affinity": OBJECT_OF_KUBERNETES,
        "tolerations": LIST_OF_OBJECTS,
        "topologySpreadConstraints": LIST_OF_OBJECTS,
        "priorityClassName": NAME_OR_NONE,
        "extraEnv": VARIABLES,
        "extraVolumes": LIST_OF_OBJECTS,
        "extraVolumeMounts": LIST_OF_OBJECTS,
        "runAsUser": NUMBER_OF_USER,
        "fsGroup": NUMBER_OF_USER,
        "service": closed(
            type={"type": "string", "enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
            annotations=TEXTS,
        ),
        "ingress": closed(
            enabled=TRUTH,
            className=NAME_OR_NONE,
            annotations=TEXTS,
            hosts={"type": "array", "items": NAME},
            tls=LIST_OF_OBJECTS,
            admin=TRUTH,
        ),
        "serviceAccount": closed(create=TRUTH, name=NAME_OR_NONE),
        "podDisruptionBudget": closed(enabled=TRUTH, maxUnavailable=count(1)),
        "networkPolicy": closed(
            enabled=TRUTH,
            clients=LIST_OF_OBJECTS,
            prometheus=LIST_OF_OBJECTS,
            operators=LIST_OF_OBJECTS,
            egress=LIST_OF_OBJECTS,
        ),
        "nameOverride": NAME_OR_NONE,
        "fullnameOverride": NAME_OR_NONE,
    }


def watching() -> dict[str, Json]:
    """Return the schemas of the values that are about metrics, alerts and the dashboard."""
    return {
        "serviceMonitor": closed(
            enabled=TRUTH,
            labels=TEXTS,
            interval=DURATION,
            scrapeTimeout=DURATION,
            clientSecret=NAME_OR_NONE,
            token=closed(existingSecret=NAME_OR_NONE, key=KEY),
        ),
        "prometheusRule": closed(
            enabled=TRUTH, labels=TEXTS, runbooksUrl={"type": "string", "pattern": "/$"}
        ),
        "dashboard": closed(enabled=TRUTH, labels=TEXTS, annotations=TEXTS),
    }


def audit() -> Json:
    """Return the schema of the audit's values."""
    return closed(
        enabled=TRUTH,
        schedule={"type": "string", "pattern": r"^(@[a-z]+|\S+( \S+){4})$"},
        timeZone=TEXT,
        image=image(),
        master={"type": "string", "minLength": 1},
        executors=closed(
            instances=count(0, 1000),
            cores=count(1),
            memory={"type": "string", "pattern": "^[0-9]+[kmgt]$"},
        ),
        sparkConf={
            "type": "object",
            "additionalProperties": False,
            "patternProperties": {r"^spark\.": TEXT},
        },
        lateAfterSeconds=SECONDS,
        lostAfterSeconds=SECONDS,
        options={"type": "array", "items": TEXT},
        mavenRepository={"type": "string", "pattern": r"^((https?|file)://.*)?$"},
        persistence=closed(existingClaim=NAME_OR_NONE, storageClass=NAME_OR_NONE, size=SIZE),
        scratchSize=SIZE,
        activeDeadlineSeconds=count(1),
        resources=resources(),
    )


def schema() -> Json:
    """Return the whole schema."""
    whole = closed(
        kafka=kafka(),
        token=closed(existingSecret=NAME_OR_NONE, key=KEY),
        principals=closed(
            existingSecret=NAME_OR_NONE,
            existingConfigMap=NAME_OR_NONE,
            key=KEY,
            operatorToken=closed(existingSecret=NAME_OR_NONE, key=KEY),
        ),
        peerSecret=closed(existingSecret=NAME_OR_NONE, key=KEY),
        peerNames={"type": "array", "items": PATTERN_OF_NAMES},
        peerPort=PORT_OR_NONE,
        insecure=TRUTH,
        tls=closed(
            existingSecret=NAME_OR_NONE,
            certKey=KEY,
            keyKey=KEY,
            caKey=KEY_OR_NONE,
            clients=closed(caSecret=NAME_OR_NONE, caKey=KEY),
        ),
        admin=closed(port=PORT_OR_NONE, token=closed(existingSecret=NAME_OR_NONE, key=KEY)),
        groups=closed(existingSecret=NAME_OR_NONE),
        allowedHosts={"type": "array", "items": NAME},
        settings=settings(),
        **proxies(),
        topicsJob=closed(
            enabled=TRUTH,
            backoffLimit=count(0, 100),
            activeDeadlineSeconds=count(1),
            resources=resources(),
        ),
        **watching(),
        audit=audit(),
        # Helm gives every chart this one, that charts may share values.
        **{"global": {"type": "object"}},
    )
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "txbroker"} | whole


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))  # noqa: T201 - the file goes where the shell sends it
