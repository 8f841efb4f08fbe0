{{/* Metadata of a component's pods. Takes (root, component). */}}
{{- define "baton.podMetadata" -}}
{{- $values := index .root.Values .component }}
labels: {{- merge (include "baton.labels" . | fromYaml) $values.podLabels | toYaml | nindent 2 }}
{{- with $values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What the pods of all components have in common. Takes (root, component). */}}
{{- define "baton.pod" -}}
{{ include "baton.podSecurity" .root }}
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
{{- with .root.Values.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - {{- merge (dict "labelSelector" (dict "matchLabels" (include "baton.selector" $ | fromYaml))) . | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* How pods of a Deployment are replaced. Takes the values of the component. */}}
{{- define "baton.strategy" -}}
{{- with .strategy }}
{{- toYaml . }}
{{- else -}}
rollingUpdate: {maxUnavailable: 0, maxSurge: 1}
{{- end }}
{{- end }}

{{- define "baton.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "baton.fullname" .) }}
{{- end }}

{{/* Rights of any pod of the release: those that PodSecurity's "restricted" leaves. Takes the root. */}}
{{- define "baton.podSecurity" -}}
serviceAccountName: {{ include "baton.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.runAsUser | int }}
  runAsGroup: {{ .Values.runAsUser | int }}
  # May read mounted Secrets, and write to volumes that are made for the pod.
  fsGroup: {{ .Values.runAsUser | int }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
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

{{/* Seconds for which a gateway that is to end still takes requests, until nobody sends any there: a sixth of the drain. */}}
{{- define "baton.drainDelay" -}}
{{ max 1 (div .Values.drainTimeoutSeconds 6) }}
{{- end }}

{{/* The files of a Secret, for the containers' user alone. Takes (volume, secret). */}}
{{- define "baton.secretVolume" -}}
- name: {{ .volume }}
  secret: {secretName: {{ .secret }}, defaultMode: 0440}
{{- end }}
