"""Sets of values with which the chart's tests render it."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

LOGIN: Values = {
    "bootstrapServers": "kafka-1:9093,kafka-2:9093",
    "securityProtocol": "SASL_SSL",
    "sasl": {"mechanism": "SCRAM-SHA-512", "existingSecret": "kafka-login", "usernameKey": "user"},
    "tls": {"caSecret": "kafka-ca", "clientSecret": "kafka-client"},
}
EVERYTHING: Values = {
    "kafka": LOGIN,
    "token": {"existingSecret": "our-token", "key": "bearer"},
    "groups": {"existingSecret": "group-secrets"},
    "allowedHosts": ["txbroker.example.org"],
    "settings": {
        "partitions": 8,
        "check_after_s": 2.5,
        "bodies_bytes_max": 268435456,
        "half_retention_s": 1209600,
        "log_format": "json",
        "topic_prefix": "shop",
        "create_target_topics": True,
    },
    "imagePullSecrets": ["registry"],
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "kafka", "operator": "Exists"}],
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}
            ]
        }
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "priorityClassName": "high",
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example.org:3128"}],
    "extraVolumes": [{"name": "more", "configMap": {"name": "more-certificates"}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/etc/ssl/more", "readOnly": True}],
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "annotations": {"cert-manager.io/issuer": "ours"},
        "hosts": ["shop.example.org"],
        "tls": [{"hosts": ["shop.example.org"], "secretName": "shop-tls"}],
    },
    "podLabels": {"team": "pay"},
    "podAnnotations": {"note": "yes"},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "networkPolicy": {
        "enabled": True,
        "clients": [{"namespaceSelector": {"matchLabels": {"kind": "shop"}}}],
        "prometheus": [{"namespaceSelector": {"matchLabels": {"kind": "monitoring"}}}],
        "egress": [{"ports": [{"port": 9093, "protocol": "TCP"}]}],
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "runbooksUrl": "https://example.org/runbooks/"},
    "dashboard": {"enabled": True, "annotations": {"folder": "Kafka"}},
    "audit": {
        "enabled": True,
        "timeZone": "Etc/UTC",
        "options": ["--business=parquet:s3a://warehouse/orders", "--id-column=tx_id"],
        "mavenRepository": "https://maven.example.org/",
        "persistence": {"storageClass": "fast"},
    },
}
SPARE: Values = {
    "replicas": 1,
    "token": {"existingSecret": ""},
    "insecure": True,
    "peerSecret": {"existingSecret": ""},
    "stop": {"delaySeconds": 0, "graceSeconds": 30},
    "listenHost": "[::]",
    "runAsUser": None,
    "fsGroup": None,
    "fullnameOverride": "half",
    "serviceAccount": {"create": False},
    "podDisruptionBudget": {"enabled": False},
    "topicsJob": {"enabled": False},
    "networkPolicy": {"enabled": True},
    "audit": {"enabled": True, "persistence": {"existingClaim": "runs"}, "sparkConf": {}},
}
PASSWORD_ONLY: Values = {
    "kafka": {
        "securityProtocol": "SASL_PLAINTEXT",
        "sasl": {"existingSecret": "kafka-login", "username": "txbroker"},
    }
}
TOKENS: Values = {"securityProtocol": "SASL_SSL", "sasl": {"mechanism": "OAUTHBEARER"}}
FETCHED: Values = {
    **TOKENS,
    "sasl": {"mechanism": "OAUTHBEARER", "existingSecret": "kafka-login"},
    "oauth": {
        "tokenUrl": "https://login.example.org/token",
        "clientId": "txbroker",
        "scope": "kafka",
        "caSecret": "login-ca",
    },
    "tls": {"clientSecret": "kafka-client", "keyPasswordKey": "pass"},
}
RENEWED: Values = {**FETCHED, "oauth": {"tokenKey": "jwt"}, "tls": {}}
PROJECTED: Values = {**TOKENS, "oauth": {"audience": "kafka", "expirationSeconds": 7200}}
TLS: Values = {"tls": {"existingSecret": "txbroker-tls"}, "serviceMonitor": {"enabled": True}}
SECURED: Values = {
    "tls": {
        "existingSecret": "txbroker-tls",
        "caKey": "ca.crt",
        "clients": {"caSecret": "callers-ca", "caKey": "ca.pem"},
    },
    "admin": {"port": 8471, "token": {"existingSecret": "operators-token", "key": "bearer"}},
    "service": {"type": "LoadBalancer"},
    "ingress": {"enabled": True, "hosts": ["operators.example.org"], "admin": True},
    "networkPolicy": {
        "enabled": True,
        "clients": [{"namespaceSelector": {"matchLabels": {"kind": "shop"}}}],
        "operators": [{"namespaceSelector": {"matchLabels": {"kind": "operators"}}}],
        "prometheus": [{"namespaceSelector": {"matchLabels": {"kind": "monitoring"}}}],
        "egress": [{"ports": [{"port": 9093, "protocol": "TCP"}]}],
    },
    "serviceMonitor": {"enabled": True, "clientSecret": "prometheus-tls"},
}
PRINCIPALS: Values = {
    "token": {"existingSecret": ""},
    "principals": {
        "existingSecret": "our-principals",
        "key": "who.toml",
        "operatorToken": {"existingSecret": "operator-token", "key": "bearer"},
    },
    "peerSecret": {"existingSecret": "our-peers", "key": "shared"},
    "peerPort": 8472,
    "networkPolicy": {"enabled": True},
    "serviceMonitor": {"enabled": True, "token": {"existingSecret": "viewer-token"}},
}
PEER_NAMES: Values = {
    "token": {"existingSecret": ""},
    "principals": {"existingConfigMap": "our-principals"},
    "tls": {"existingSecret": "txbroker-tls", "clients": {"caSecret": "callers-ca"}},
    "admin": {"port": 8471, "token": {"existingSecret": "operators-token"}},
    "peerNames": ["*.shop-txbroker-peers.pay.svc.cluster.local", "proxy-?"],
    "peerSecret": {"existingSecret": ""},
    "peerPort": 8472,
    "networkPolicy": {
        "enabled": True,
        "clients": [{"namespaceSelector": {"matchLabels": {"kind": "shop"}}}],
        "egress": [{"ports": [{"port": 9093, "protocol": "TCP"}]}],
    },
}
WORKERS: Values = {
    "workers": 3,
    "admin": {"port": 8480},
    "peerPort": 8490,
    "networkPolicy": {"enabled": True, "egress": [{"ports": [{"port": 9093, "protocol": "TCP"}]}]},
    "serviceMonitor": {"enabled": True},
}
EXECUTORS: Values = {
    "kafka": {"oauth": {"audience": "kafka"}, **TOKENS},
    "imagePullSecrets": ["registry"],
    "audit": {
        "enabled": True,
        "options": ["--out=s3a://warehouse/audit"],
        "executors": {"instances": 3, "memory": "4g"},
    },
}
NEEDED: Values = {"peerSecret": {"existingSecret": "txbroker-peers"}}
"""Without which the chart makes no more than one proxy."""
_SETS: dict[str, Values] = {
    "defaults": {},
    "everything": EVERYTHING,
    "spare": SPARE,
    "password": PASSWORD_ONLY,
    "tls": TLS,
    "secured": SECURED,
    "fetched tokens": {"kafka": FETCHED, "audit": {"enabled": True}},
    "renewed token": {"kafka": RENEWED},
    "projected token": {"kafka": PROJECTED, "audit": {"enabled": True}},
    "principals": PRINCIPALS,
    "peer names": PEER_NAMES,
    "workers": WORKERS,
    "executors": EXECUTORS,
}
SETS = {name: {**NEEDED, **values} for name, values in _SETS.items()}
