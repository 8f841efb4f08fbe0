{{/* Begins every name. Components add at most nine characters to it. */}}
{{- define "baton.fullname" -}}
{{- $name := printf "%s-%s" .Release.Name .Chart.Name -}}
{{- if contains .Chart.Name .Release.Name -}}{{- $name = .Release.Name -}}{{- end -}}
{{- .Values.fullnameOverride | default $name | trunc 50 | trimSuffix "-" -}}
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

{{/* Metadata of a component's pods. Takes (root, component). */}}
{{- define "baton.podMetadata" -}}
labels: {{- include "baton.labels" . | nindent 2 }}
{{- with (index .root.Values .component).podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What the pods of all components have in common. Takes (root, component). */}}
{{- define "baton.pod" -}}
serviceAccountName: {{ include "baton.fullname" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .root.Values.runAsUser | int }}
  runAsGroup: {{ .root.Values.runAsUser | int }}
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $values := index .root.Values .component }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "baton.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{/* Where gateways and workers find Redis. In the environment: command lines are for all to see. */}}
{{- define "baton.redisEnv" -}}
{{- if .Values.redis.enabled -}}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {{ include "baton.redisPassword" . }}}
- name: BATON_REDIS_URL
  value: {{ printf "redis://:$(REDIS_PASSWORD)@%s-redis:%d" (include "baton.fullname" .) (int .Values.redis.port) }}
{{- else -}}
- name: BATON_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ required "redis.urlSecret must name a Secret when redis.enabled is false" .Values.redis.urlSecret }}
      key: url
{{- end }}
{{- end }}

{{- define "baton.redisPassword" -}}
{name: {{ .Values.redis.passwordSecret | default (printf "%s-redis" (include "baton.fullname" .)) }}, key: password}
{{- end }}

{{- define "baton.volumes" -}}
- name: model
{{- if .Values.model.hostPath }}
  hostPath: {path: {{ .Values.model.hostPath | quote }}, type: Directory}
{{- else }}
  persistentVolumeClaim:
    claimName: {{ required "model.existingClaim or model.hostPath must be set" .Values.model.existingClaim }}
    readOnly: true
{{- end }}
- name: tmp
  emptyDir: {}
- name: kernels
  emptyDir: {}
- name: hub
  emptyDir: {}
{{- end }}

{{- define "baton.volumeMounts" -}}
- {name: model, mountPath: {{ .Values.model.mountPath | quote }}, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: kernels, mountPath: /var/cache/baton}
- {name: hub, mountPath: /var/cache/huggingface}
{{- end }}
