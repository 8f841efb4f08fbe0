{{/* Where a model comes from: the hub, into each pod; the hub, into a volume that a Job fills; or a volume of one's own. */}}

{{- define "baton.modelCached" -}}
{{- if and .Values.model.hub.id .Values.model.cache.size }}true{{ end }}
{{- end }}

{{- define "baton.modelFetched" -}}
{{- if and .Values.model.hub.id (not .Values.model.cache.size) }}true{{ end }}
{{- end }}

{{/* The directory in the volume that the Job fills. */}}
{{- define "baton.modelDirectory" -}}
{{ printf "%s/%s/%s" .Values.model.mountPath .Values.model.hub.id (.Values.model.hub.revision | default "main") }}
{{- end }}

{{- define "baton.modelArgs" -}}
{{- if include "baton.modelFetched" . -}}
- {{ printf "--model=%s" .Values.model.hub.id | quote }}
{{- with .Values.model.hub.revision }}
- {{ printf "--revision=%s" . | quote }}
{{- end }}
{{- else if include "baton.modelCached" . -}}
- {{ printf "--model=%s" (include "baton.modelDirectory" .) | quote }}
{{- else -}}
- {{ printf "--model=%s" .Values.model.path | quote }}
{{- end }}
{{- end }}

{{- define "baton.servedName" -}}
{{ .Values.model.servedName | default .Values.model.hub.id | default (base .Values.model.path | trimSuffix ".gguf") }}
{{- end }}

{{/* Of containers that speak to the hub. */}}
{{- define "baton.hubEnv" -}}
- name: HF_HOME
  value: {{ .Values.model.mountPath | quote }}
{{- with .Values.model.hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
{{- end }}
{{- with .Values.model.hub.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "baton.modelVolume" -}}
- name: model
{{- if include "baton.modelFetched" . }}
  emptyDir: {}
{{- else if include "baton.modelCached" . }}
  persistentVolumeClaim: {claimName: {{ include "baton.fullname" . }}-model, readOnly: true}
{{- else if .Values.model.hostPath }}
  hostPath: {path: {{ .Values.model.hostPath | quote }}, type: Directory}
{{- else }}
  persistentVolumeClaim:
    claimName: {{ required "model.existingClaim, model.hostPath or model.hub.id must be set" .Values.model.existingClaim }}
    readOnly: true
{{- end }}
{{- end }}

{{- define "baton.modelMount" -}}
- name: model
  mountPath: {{ .Values.model.mountPath | quote }}
  {{- if not (include "baton.modelFetched" .) }}
  readOnly: true
  {{- end }}
{{- end }}

{{/* Waits for the Job that fills the volume: it writes this file last. */}}
{{- define "baton.modelWait" -}}
{{- if include "baton.modelCached" . -}}
initContainers:
  - name: model
    {{- include "baton.image" . | nindent 4 }}
    command: [sh, -c]
    args: ['until [ -e "$0/.whole" ]; do sleep 2; done', {{ include "baton.modelDirectory" . | quote }}]
    resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 64Mi}}
    securityContext: {{- include "baton.containerSecurity" . | nindent 6 }}
    volumeMounts: {{- include "baton.modelMount" . | nindent 6 }}
{{- end }}
{{- end }}
