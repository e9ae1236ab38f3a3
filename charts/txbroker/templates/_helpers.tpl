{{- define "txbroker.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough for the hashes and endings that Kubernetes and this chart add to names. */}}
{{- define "txbroker.fullname" -}}
{{- $name := include "txbroker.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "txbroker.peers" -}}
{{ include "txbroker.fullname" . }}-peers
{{- end -}}

{{/* The name of a port of one worker. Call with a list: that of the first one's, and how many workers
come before. */}}
{{- define "txbroker.portOf" -}}
{{ index . 0 }}{{ if index . 1 }}-{{ add1 (index . 1) }}{{ end }}
{{- end -}}

{{/* All ports of a Pod by their names, as JSON: a list of lists of name and number. */}}
{{- define "txbroker.ports" -}}
{{- $first := list (list (include "txbroker.scheme" .) .Values.port) (list "admin" .Values.admin.port) (list "peers" .Values.peerPort) -}}
{{- $ports := list -}}
{{- range $port := $first -}}
{{- if index $port 1 -}}
{{- range $before := until (int $.Values.workers) -}}
{{- $name := include "txbroker.portOf" (list (index $port 0) $before) -}}
{{- $ports = append $ports (list $name (add (int (index $port 1)) $before)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $ports -}}
{{- end -}}

{{/* The ports of a kind, one for each worker, as a NetworkPolicy lists them. Call with a list of the
root and the name of the first one's. */}}
{{- define "txbroker.policyPorts" -}}
{{- $kind := index . 1 -}}
{{- range $before := until (int (index . 0).Values.workers) }}
- protocol: TCP
  port: {{ include "txbroker.portOf" (list $kind $before) }}
{{- end }}
{{- end -}}

{{- define "txbroker.labels" -}}
{{ include "txbroker.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "txbroker.selector" -}}
app.kubernetes.io/name: {{ include "txbroker.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* One installation has Pods of several kinds; only the proxies take calls. */}}
{{- define "txbroker.proxies" -}}
{{ include "txbroker.selector" . }}
app.kubernetes.io/component: proxy
{{- end -}}

{{- define "txbroker.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "txbroker.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* A hook runs before the chart's own service account is there. */}}
{{- define "txbroker.hookServiceAccount" -}}
{{- if .Values.serviceAccount.create }}default{{ else }}{{ include "txbroker.serviceAccount" . }}{{ end -}}
{{- end -}}

{{- define "txbroker.usesSasl" -}}
{{- if hasPrefix "SASL" .Values.kafka.securityProtocol }}yes{{ end -}}
{{- end -}}

{{- define "txbroker.usesTokens" -}}
{{- if and (include "txbroker.usesSasl" .) (eq .Values.kafka.sasl.mechanism "OAUTHBEARER") }}yes{{ end -}}
{{- end -}}

{{/* The key in kafka.sasl.existingSecret that is needed; none where Kubernetes makes the tokens. */}}
{{- define "txbroker.loginKey" -}}
{{- $kafka := .Values.kafka -}}
{{- if not (include "txbroker.usesSasl" .) -}}
{{- else if not (include "txbroker.usesTokens" .) -}}
{{- $kafka.sasl.passwordKey -}}
{{- else if $kafka.oauth.tokenUrl -}}
{{- $kafka.oauth.clientSecretKey -}}
{{- else -}}
{{- $kafka.oauth.tokenKey -}}
{{- end -}}
{{- end -}}

{{- define "txbroker.usesTls" -}}
{{- if hasSuffix "SSL" .Values.kafka.securityProtocol }}yes{{ end -}}
{{- end -}}

{{- define "txbroker.scheme" -}}
{{- if .Values.tls.existingSecret }}https{{ else }}http{{ end -}}
{{- end -}}

{{/* The name of the port at which operators call, and its number. */}}
{{- define "txbroker.adminName" -}}
{{- if .Values.admin.port }}admin{{ else }}{{ include "txbroker.scheme" . }}{{ end -}}
{{- end -}}

{{- define "txbroker.adminPort" -}}
{{- .Values.admin.port | default .Values.port | int -}}
{{- end -}}

{{/* Where everything outside of a Pod finds a proxy by its own name. */}}
{{- define "txbroker.ownHost" -}}
$(POD_NAME).{{ include "txbroker.peers" . }}.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end -}}

{{/* The token that operators need, as a dict of existingSecret, key and the folder in the Pod. */}}
{{- define "txbroker.adminToken" -}}
{{- if .Values.admin.token.existingSecret -}}
{{- merge (dict "folder" "admin-token") .Values.admin.token | toJson -}}
{{- else if .Values.principals.operatorToken.existingSecret -}}
{{- merge (dict "folder" "operator-token") .Values.principals.operatorToken | toJson -}}
{{- else -}}
{{- merge (dict "folder" "token") .Values.token | toJson -}}
{{- end -}}
{{- end -}}

{{/* The Secret or ConfigMap that holds the principals. */}}
{{- define "txbroker.principals" -}}
{{- .Values.principals.existingSecret | default .Values.principals.existingConfigMap -}}
{{- end -}}

{{/* Where callers need a credential. */}}
{{- define "txbroker.guarded" -}}
{{- if or .Values.token.existingSecret (include "txbroker.principals" .) .Values.tls.clients.caSecret }}yes{{ end -}}
{{- end -}}

{{- define "txbroker.peerIdentity" -}}
{{- if or .Values.peerSecret.existingSecret .Values.peerNames }}yes{{ end -}}
{{- end -}}

{{/* Checks that the schema cannot express: values that contradict one another. */}}
{{- define "txbroker.validate" -}}
{{- $kafka := .Values.kafka -}}
{{- $sasl := $kafka.sasl -}}
{{- if not (or (include "txbroker.guarded" .) .Values.insecure) -}}
{{- fail "every Pod of the cluster could decide transactions: set token.existingSecret, principals or tls.clients.caSecret, or insecure if the network is closed" -}}
{{- end -}}
{{- if and .Values.tls.clients.caSecret (not .Values.tls.existingSecret) -}}
{{- fail "tls.clients.caSecret needs tls.existingSecret" -}}
{{- end -}}
{{- if and .Values.tls.clients.caSecret .Values.serviceMonitor.enabled (not .Values.serviceMonitor.clientSecret) -}}
{{- fail "with tls.clients.caSecret Prometheus needs a certificate: set serviceMonitor.clientSecret" -}}
{{- end -}}
{{- if and .Values.admin.token.existingSecret (not .Values.admin.port) -}}
{{- fail "admin.token.existingSecret needs admin.port: at one address there is one token" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.enabled needs ingress.hosts: proxies answer to names that they know only" -}}
{{- end -}}
{{- if and .Values.ingress.enabled .Values.ingress.admin (not .Values.admin.port) -}}
{{- fail "ingress.admin needs admin.port: without it `port` serves operators, too" -}}
{{- end -}}
{{- if eq (int .Values.admin.port) (int .Values.port) -}}
{{- fail "admin.port must be another one than port" -}}
{{- end -}}
{{- include "txbroker.validatePeers" . -}}
{{- $numbers := list -}}
{{- range $port := include "txbroker.ports" . | fromJsonArray -}}
{{- if gt (int (index $port 1)) 65535 -}}
{{- fail (printf "the %d workers of a Pod would have the port %v (%s), which does not exist: leave room up to 65535" (int $.Values.workers) (index $port 1) (index $port 0)) -}}
{{- end -}}
{{- $numbers = append $numbers (int (index $port 1)) -}}
{{- end -}}
{{- if ne (len $numbers) (len (uniq $numbers)) -}}
{{- fail (printf "each of the %d workers of a Pod has the ports after those of the one before: leave room between port, admin.port and peerPort" (int .Values.workers)) -}}
{{- end -}}
{{- $oauth := $kafka.oauth -}}
{{- if include "txbroker.usesTokens" . -}}
{{- if or $sasl.username $sasl.usernameKey -}}
{{- fail "kafka.sasl.username and kafka.sasl.usernameKey are not for OAUTHBEARER, which logs in by token" -}}
{{- end -}}
{{- if ne (len (compact (list $oauth.tokenUrl $oauth.tokenKey $oauth.audience))) 1 -}}
{{- fail "kafka.sasl.mechanism OAUTHBEARER needs one of kafka.oauth.tokenUrl, kafka.oauth.tokenKey and kafka.oauth.audience" -}}
{{- end -}}
{{- if and $oauth.tokenUrl (not $oauth.clientId) -}}
{{- fail "kafka.oauth.tokenUrl needs kafka.oauth.clientId" -}}
{{- end -}}
{{- else if or $oauth.tokenUrl $oauth.tokenKey $oauth.audience $oauth.clientId $oauth.caSecret -}}
{{- fail "kafka.oauth needs kafka.securityProtocol SASL_SSL or SASL_PLAINTEXT and kafka.sasl.mechanism OAUTHBEARER" -}}
{{- end -}}
{{- if and $kafka.tls.keyPasswordKey (not $kafka.tls.clientSecret) -}}
{{- fail "kafka.tls.keyPasswordKey needs kafka.tls.clientSecret" -}}
{{- end -}}
{{- if and (include "txbroker.loginKey" .) (not $sasl.existingSecret) -}}
{{- fail (printf "kafka.securityProtocol %s needs kafka.sasl.existingSecret" $kafka.securityProtocol) -}}
{{- end -}}
{{- if and (include "txbroker.usesSasl" .) (not (include "txbroker.usesTokens" .)) (not (or $sasl.username $sasl.usernameKey)) -}}
{{- fail (printf "kafka.securityProtocol %s needs kafka.sasl.username or kafka.sasl.usernameKey" $kafka.securityProtocol) -}}
{{- end -}}
{{- if and $sasl.username $sasl.usernameKey -}}
{{- fail "kafka.sasl.username and kafka.sasl.usernameKey exclude one another" -}}
{{- end -}}
{{- if and (not (include "txbroker.usesSasl" .)) (or $sasl.existingSecret $sasl.username $sasl.usernameKey) -}}
{{- fail "kafka.sasl needs kafka.securityProtocol SASL_SSL or SASL_PLAINTEXT" -}}
{{- end -}}
{{- if and (not (include "txbroker.usesTls" .)) (or $kafka.tls.caSecret $kafka.tls.clientSecret) -}}
{{- fail "kafka.tls needs kafka.securityProtocol SSL or SASL_SSL" -}}
{{- end -}}
{{- if lt (int .Values.stop.graceSeconds) (add (int .Values.stop.delaySeconds) 20) -}}
{{- fail "stop.graceSeconds must be at least 20 more than stop.delaySeconds: handing over takes some 15 seconds at most" -}}
{{- end -}}
{{- if gt (float64 .Values.audit.lateAfterSeconds) (float64 .Values.audit.lostAfterSeconds) -}}
{{- fail "audit.lateAfterSeconds must not be more than audit.lostAfterSeconds: a lost transaction has been late before" -}}
{{- end -}}
{{- if .Values.audit.executors.instances -}}
{{- if not (regexMatch " --out=[a-z0-9]+://" (join " " (prepend .Values.audit.options ""))) -}}
{{- fail "audit.executors needs --out=URI in audit.options: Pods of executors do not have the volume of the tables" -}}
{{- end -}}
{{- if ne .Values.audit.master "local[*]" -}}
{{- fail "audit.executors and audit.master exclude one another: the master is Kubernetes" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A secret that the chart made would change at each `helm template`, which cannot look up the one
in the cluster: Argo CD and Flux would replace it again and again. So it has to exist. */}}
{{- define "txbroker.validatePeers" -}}
{{- if and .Values.principals.existingSecret .Values.principals.existingConfigMap -}}
{{- fail "principals.existingSecret and principals.existingConfigMap exclude one another" -}}
{{- end -}}
{{- if and .Values.principals.operatorToken.existingSecret (not (include "txbroker.principals" .)) -}}
{{- fail "principals.operatorToken needs principals.existingSecret or principals.existingConfigMap" -}}
{{- end -}}
{{- if and .Values.peerNames (not .Values.tls.clients.caSecret) -}}
{{- fail "peerNames needs tls.clients.caSecret: without it no client certificate is asked for" -}}
{{- end -}}
{{- if .Values.peerPort -}}
{{- if has (int .Values.peerPort) (list (int .Values.port) (int .Values.admin.port)) -}}
{{- fail "peerPort must be another one than port and admin.port" -}}
{{- end -}}
{{- if not (or (include "txbroker.peerIdentity" .) .Values.insecure) -}}
{{- fail "peerPort needs peerSecret.existingSecret or peerNames" -}}
{{- end -}}
{{- end -}}
{{- $proxies := mul (int .Values.replicas) (int .Values.workers) -}}
{{- if and (gt $proxies 1) (include "txbroker.guarded" .) (not (include "txbroker.peerIdentity" .)) -}}
{{- fail (printf "%d proxies must prove to one another that they are proxies, as callers need a credential: make a Secret, for instance with `kubectl create secret generic txbroker-peers --from-literal=secret=\"$(openssl rand -hex 32)\"`, and name it with peerSecret.existingSecret, or set peerNames" $proxies) -}}
{{- end -}}
{{- end -}}

{{/* Helm reads whole numbers of a file as floats, and would write large ones as 1e+06. */}}
{{- define "txbroker.toml" -}}
{{- if kindIs "string" . -}}
{{ toJson . }}
{{- else if kindIs "bool" . -}}
{{ . }}
{{- else if eq (floor .) (float64 .) -}}
{{ int64 . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{/* The config file of everything that this chart runs. No secret is in it, only files' names. */}}
{{- define "txbroker.config" -}}
{{- $kafka := .Values.kafka -}}
kafka = {{ toJson $kafka.bootstrapServers }}
kafka_security_protocol = {{ toJson $kafka.securityProtocol }}
{{- if include "txbroker.usesSasl" . }}
kafka_sasl_mechanism = {{ toJson $kafka.sasl.mechanism }}
{{- with $kafka.sasl.username }}
kafka_sasl_username = {{ toJson . }}
{{- end }}
{{- if not (include "txbroker.usesTokens" .) }}
kafka_sasl_password_file = {{ printf "/etc/txbroker/kafka-login/%s" $kafka.sasl.passwordKey | toJson }}
{{- else if $kafka.oauth.tokenUrl }}
kafka_oauth_token_url = {{ toJson $kafka.oauth.tokenUrl }}
kafka_oauth_client_id = {{ toJson $kafka.oauth.clientId }}
kafka_oauth_client_secret_file = {{ printf "/etc/txbroker/kafka-login/%s" $kafka.oauth.clientSecretKey | toJson }}
{{- with $kafka.oauth.scope }}
kafka_oauth_scope = {{ toJson . }}
{{- end }}
{{- if $kafka.oauth.caSecret }}
kafka_oauth_ca_file = {{ printf "/etc/txbroker/kafka-oauth-ca/%s" $kafka.oauth.caKey | toJson }}
{{- end }}
{{- else if $kafka.oauth.tokenKey }}
kafka_oauth_token_file = {{ printf "/etc/txbroker/kafka-login/%s" $kafka.oauth.tokenKey | toJson }}
{{- else }}
kafka_oauth_token_file = "/etc/txbroker/kafka-token/token"
{{- end }}
{{- end }}
{{- if $kafka.tls.caSecret }}
kafka_ssl_ca_file = {{ printf "/etc/txbroker/kafka-ca/%s" $kafka.tls.caKey | toJson }}
{{- end }}
{{- if $kafka.tls.clientSecret }}
kafka_ssl_cert_file = {{ printf "/etc/txbroker/kafka-client/%s" $kafka.tls.certKey | toJson }}
kafka_ssl_key_file = {{ printf "/etc/txbroker/kafka-client/%s" $kafka.tls.keyKey | toJson }}
{{- with $kafka.tls.keyPasswordKey }}
kafka_ssl_key_password_file = {{ printf "/etc/txbroker/kafka-client/%s" . | toJson }}
{{- end }}
{{- end }}
{{- if .Values.insecure }}
insecure = true
{{- end }}
{{- range $name, $value := .Values.settings }}
{{ $name }} = {{ include "txbroker.toml" $value }}
{{- end }}
{{- end -}}

{{/* Every DNS name of the Services and the Pod, with any part of the suffix left off. */}}
{{- define "txbroker.hosts" -}}
{{- $hosts := list -}}
{{- $service := include "txbroker.fullname" . -}}
{{- $peers := include "txbroker.peers" . -}}
{{- range $name := list $service $peers (printf "$(POD_NAME).%s" $peers) (printf "%s-admin" $service) -}}
{{- $inside := printf "%s.%s.svc" $name $.Release.Namespace -}}
{{- $hosts = concat $hosts (list $name (trimSuffix ".svc" $inside) $inside (printf "%s.%s" $inside $.Values.clusterDomain)) -}}
{{- end -}}
{{- concat $hosts .Values.allowedHosts (.Values.ingress.enabled | ternary .Values.ingress.hosts list) | uniq | join "," -}}
{{- end -}}

{{- define "txbroker.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.runAsUser }}
runAsUser: {{ int64 . }}
runAsGroup: {{ int64 . }}
{{- end }}
{{- with .Values.fsGroup }}
fsGroup: {{ int64 . }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "txbroker.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Of every Pod: no token of the API server, and no variables that Kubernetes makes of Services.
Those of a Service called txbroker would begin with TXBROKER_, as settings do. */}}
{{- define "txbroker.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "txbroker.podSecurity" . | nindent 2 }}
{{- end -}}

{{- define "txbroker.env" -}}
- name: TXBROKER_CONFIG
  value: /etc/txbroker/config/txbroker.toml
{{- if and (include "txbroker.usesSasl" .) .Values.kafka.sasl.usernameKey }}
- name: TXBROKER_KAFKA_SASL_USERNAME
  valueFrom:
    secretKeyRef:
      name: {{ .Values.kafka.sasl.existingSecret }}
      key: {{ .Values.kafka.sasl.usernameKey }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* How the commands that are called in a Pod trust the proxies, and prove who they are. */}}
{{- define "txbroker.callerEnv" -}}
{{- with .Values.tls }}
{{- if and .existingSecret .caKey }}
- name: TXBROKER_CA_FILE
  value: /etc/txbroker/tls/{{ .caKey }}
{{- end }}
{{- if .clients.caSecret }}
- name: TXBROKER_CLIENT_CERT_FILE
  value: /etc/txbroker/tls/{{ .certKey }}
- name: TXBROKER_CLIENT_KEY_FILE
  value: /etc/txbroker/tls/{{ .keyKey }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Keys of a Secret as a volume. Call with a dict of name, secret and keys. */}}
{{- define "txbroker.secretVolume" -}}
- name: {{ .name }}
  secret:
    secretName: {{ .secret }}
    defaultMode: 0440
    items:
      {{- range .keys | compact | uniq }}
      - key: {{ . }}
        path: {{ . }}
      {{- end }}
{{- end -}}

{{/* The settings by which a proxy is called, but for its tokens. */}}
{{- define "txbroker.accessEnv" -}}
{{- $scheme := include "txbroker.scheme" . -}}
- name: TXBROKER_LISTEN
  value: "{{ .Values.listenHost }}:{{ int .Values.port }}"
- name: TXBROKER_ADVERTISE
  value: {{ $scheme }}://{{ include "txbroker.ownHost" . }}:{{ int .Values.port }}
{{- if gt (int .Values.workers) 1 }}
- name: TXBROKER_WORKERS
  value: "{{ int .Values.workers }}"
{{- end }}
{{- if .Values.admin.port }}
- name: TXBROKER_ADMIN_LISTEN
  value: "{{ .Values.listenHost }}:{{ int .Values.admin.port }}"
{{- end }}
{{- if .Values.peerPort }}
- name: TXBROKER_PEER_LISTEN
  value: "{{ .Values.listenHost }}:{{ int .Values.peerPort }}"
- name: TXBROKER_PEER_ADVERTISE
  value: {{ $scheme }}://{{ include "txbroker.ownHost" . }}:{{ int .Values.peerPort }}
{{- end }}
{{- if include "txbroker.principals" . }}
- name: TXBROKER_PRINCIPALS_FILE
  value: /etc/txbroker/principals/{{ .Values.principals.key }}
{{- end }}
{{- if .Values.peerSecret.existingSecret }}
- name: TXBROKER_PEER_SECRET_FILE
  value: /etc/txbroker/peer-secret/{{ .Values.peerSecret.key }}
{{- end }}
{{- if .Values.groups.existingSecret }}
- name: TXBROKER_SECRETS_DIR
  value: /etc/txbroker/groups
{{- end }}
{{- with .Values.peerNames }}
- name: TXBROKER_PEER_NAMES
  value: {{ join "," . | quote }}
{{- end }}
{{- with .Values.tls }}
{{- if .existingSecret }}
- name: TXBROKER_TLS_CERT_FILE
  value: /etc/txbroker/tls/{{ .certKey }}
- name: TXBROKER_TLS_KEY_FILE
  value: /etc/txbroker/tls/{{ .keyKey }}
{{- if .caKey }}
- name: TXBROKER_PEERS_CA_FILE
  value: /etc/txbroker/tls/{{ .caKey }}
{{- end }}
{{- end }}
{{- if .clients.caSecret }}
- name: TXBROKER_TLS_CLIENT_CA_FILE
  value: /etc/txbroker/tls-clients/{{ .clients.caKey }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Folders and never single files, so that changes of a Secret arrive. */}}
{{- define "txbroker.mounts" -}}
- name: config
  mountPath: /etc/txbroker/config
  readOnly: true
{{- if include "txbroker.loginKey" . }}
- name: kafka-login
  mountPath: /etc/txbroker/kafka-login
  readOnly: true
{{- end }}
{{- if .Values.kafka.oauth.audience }}
- name: kafka-token
  mountPath: /etc/txbroker/kafka-token
  readOnly: true
{{- end }}
{{- if .Values.kafka.oauth.caSecret }}
- name: kafka-oauth-ca
  mountPath: /etc/txbroker/kafka-oauth-ca
  readOnly: true
{{- end }}
{{- if .Values.kafka.tls.caSecret }}
- name: kafka-ca
  mountPath: /etc/txbroker/kafka-ca
  readOnly: true
{{- end }}
{{- if .Values.kafka.tls.clientSecret }}
- name: kafka-client
  mountPath: /etc/txbroker/kafka-client
  readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Call with a dict of `root` and `config`, the ConfigMap's name. */}}
{{- define "txbroker.volumes" -}}
{{- $kafka := .root.Values.kafka -}}
- name: config
  configMap:
    name: {{ .config }}
{{- with include "txbroker.loginKey" .root }}
- name: kafka-login
  secret:
    secretName: {{ $kafka.sasl.existingSecret }}
    defaultMode: 0440
    items:
      - key: {{ . }}
        path: {{ . }}
{{- end }}
{{- if $kafka.oauth.audience }}
- name: kafka-token
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken:
          audience: {{ $kafka.oauth.audience | quote }}
          expirationSeconds: {{ int64 $kafka.oauth.expirationSeconds }}
          path: token
{{- end }}
{{- if $kafka.oauth.caSecret }}
- name: kafka-oauth-ca
  secret:
    secretName: {{ $kafka.oauth.caSecret }}
    defaultMode: 0440
    items:
      - key: {{ $kafka.oauth.caKey }}
        path: {{ $kafka.oauth.caKey }}
{{- end }}
{{- if $kafka.tls.caSecret }}
- name: kafka-ca
  secret:
    secretName: {{ $kafka.tls.caSecret }}
    defaultMode: 0440
    items:
      - key: {{ $kafka.tls.caKey }}
        path: {{ $kafka.tls.caKey }}
{{- end }}
{{- if $kafka.tls.clientSecret }}
- name: kafka-client
  secret:
    secretName: {{ $kafka.tls.clientSecret }}
    defaultMode: 0440
    items:
      - key: {{ $kafka.tls.certKey }}
        path: {{ $kafka.tls.certKey }}
      - key: {{ $kafka.tls.keyKey }}
        path: {{ $kafka.tls.keyKey }}
      {{- with $kafka.tls.keyPasswordKey }}
      - key: {{ . }}
        path: {{ . }}
      {{- end }}
{{- end }}
{{- with .root.Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
