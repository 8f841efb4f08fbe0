{{/* The metrics of this release's gateways, as Prometheus finds them: by the namespace and the pod. Takes the root. */}}
{{- define "baton.series" -}}
namespace="{{ .Release.Namespace }}",pod=~"{{ include "baton.fullname" . }}-gateway-.*"
{{- end }}

{{/* Leaves out what supervisors, load balancers, Prometheus and consoles ask, and no client: by the label of a metric. */}}
{{- define "baton.clients" -}}
endpoint!~"console([.].*)?|debug[.].*|docs([.].*)?|health|load|metrics|openapi[.]json|ping|ready|root"
{{- end }}

{{/* Requests in flight at all gateways, or sequences at all workers of a role. Every gateway reports every worker. */}}
{{- define "baton.work" -}}
{{- $series := include "baton.series" .root }}
{{- if eq .component "gateway" -}}
sum(baton_requests_in_flight{ {{- $series -}} })
{{- else -}}
sum(max by (worker) (baton_worker_running{role="{{ .component }}",{{ $series }}} + baton_worker_waiting{role="{{ .component }}",{{ $series }}}))
{{- end }}
{{- end }}

{{/* The recording rule of the above, by which an autoscaler asks for it. Takes (root, component). */}}
{{- define "baton.workRecord" -}}
baton:{{ .component }}_{{ ternary "requests" "sequences" (eq .component "gateway") }}:sum
{{- end }}

{{/* The share of first tokens that came later than they should, in a window. Takes (root, window). */}}
{{- define "baton.lateTokens" -}}
{{- $series := include "baton.series" .root }}
{{- $bound := .root.Values.monitoring.rules.ttftSeconds -}}
1 - sum(rate(baton_ttft_seconds_bucket{le=~"{{ $bound }}([.]0)?",{{ $series }}}[{{ .window }}])) / sum(rate(baton_ttft_seconds_count{ {{- $series -}} }[{{ .window }}]))
{{- end }}

{{/* The recording rule of the above. Takes (root, window). */}}
{{- define "baton.lateRecord" -}}
baton:first_tokens_late:share{{ .window }}
{{- end }}

{{/* How gateways are scraped. Takes the root. */}}
{{- define "baton.endpoint" -}}
port: admin
path: /metrics
interval: {{ .Values.monitoring.interval }}
{{- with .Values.monitoring.relabelings }}
relabelings: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.monitoring.metricRelabelings }}
metricRelabelings: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.tls.enabled }}
scheme: https
tlsConfig:
  {{- with .Values.monitoring.tlsConfig }}
  {{- toYaml . | nindent 2 }}
  {{- else }}
  serverName: {{ include "baton.tlsName" . }}
  {{- if not (or .Values.tls.existingSecret .Values.tls.issuerRef) }}
  ca: {secret: {name: {{ include "baton.tlsSecret" . }}, key: ca.crt}}
  {{- end }}
  {{- end }}
{{- end }}
{{- end }}
