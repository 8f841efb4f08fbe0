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
