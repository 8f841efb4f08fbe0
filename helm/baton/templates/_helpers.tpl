{{/* Begins every name. Components add at most fifteen characters to it. */}}
{{- define "baton.fullname" -}}
{{- $name := printf "%s-%s" .Release.Name .Chart.Name -}}
{{- if contains .Chart.Name .Release.Name -}}{{- $name = .Release.Name -}}{{- end -}}
{{- .Values.fullnameOverride | default $name | trunc 46 | trimSuffix "-" -}}
{{- end }}

{{/* The labels by which pods of a component are found, or, without one, those of the release. Takes (root, component). */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{/* Takes (root, component). */}}
{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* Name and labels of a manifest. Takes (root, component, and suffix where the name has another than the component). */}}
{{- define "baton.metadata" -}}
name: {{ printf "%s-%s" (include "baton.fullname" .root) (.suffix | default .component) }}
labels: {{- include "baton.labels" . | nindent 2 }}
{{- end }}

{{/* The checks of values that contradict each other; what they find, nothing is rendered with. */}}
{{- define "baton.check" -}}
{{- if not (or .Values.allowPlaintext .Values.mtls.enabled) }}
{{- fail "allowPlaintext is false: set mtls.enabled, by which workers and gateways speak TLS" }}
{{- end }}
{{- if and .Values.keys.allowAnonymous (or .Values.keys.existingSecret .Values.keys.apiKeySecret) }}
{{- fail "keys.allowAnonymous says that there are no keys: leave out keys.existingSecret and keys.apiKeySecret" }}
{{- end }}
{{- if and .Values.model.cache.size (not .Values.model.hub.id) }}
{{- fail "model.cache.size is for a model from the hub: name one with model.hub.id" }}
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
{{- fail "httpRoute.parentRefs must name a Gateway" }}
{{- end }}
{{- if and (eq .Values.autoscaling.kind "keda") (not .Values.autoscaling.prometheus) }}
{{- fail "autoscaling.prometheus must be the URL of a Prometheus, which KEDA asks" }}
{{- end }}
{{- if and (eq .Values.autoscaling.kind "hpa") (not .Values.monitoring.rules.enabled) }}
{{- fail "autoscaling.kind hpa asks for records of Prometheus: set monitoring.rules.enabled" }}
{{- end }}
{{- if and .Values.tls.enabled .Values.tls.issuerRef (not .Values.tls.dnsNames) }}
{{- fail "tls.dnsNames must have the names that tls.issuerRef is to sign" }}
{{- end }}
{{- range $role := list "prefill" "decode" }}
{{- if and (index $.Values $role).gpus (eq $.Values.workers.device "cpu") }}
{{- fail (printf "%s.gpus asks for GPUs, and workers.device is cpu" $role) }}
{{- end }}
{{- end }}
{{- end }}
