{{/* Which Secrets there are, and how gateways and workers get them: passwords by the environment, files by volumes. */}}

{{/* Certificates of a component: tls.crt, tls.key, ca.crt. Takes (root, component). */}}
{{- define "baton.mtlsSecret" -}}
{{- index .root.Values.mtls.existingSecrets .component | default (printf "%s-%s-mtls" (include "baton.fullname" .root) .component) }}
{{- end }}

{{/* The certificate that clients see. */}}
{{- define "baton.tlsSecret" -}}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "baton.fullname" .)) }}
{{- end }}

{{/* Passwords of Redis' users, by their names. */}}
{{- define "baton.redisSecret" -}}
{{- .Values.redis.passwordSecret | default (printf "%s-redis" (include "baton.fullname" .)) }}
{{- end }}

{{/* A key with full rights, which the helm test has too. Empty: there is none. */}}
{{- define "baton.apiKeySecret" -}}
{{- if .Values.keys.apiKeySecret }}{{ .Values.keys.apiKeySecret }}
{{- else if not (or .Values.keys.existingSecret .Values.keys.allowAnonymous) }}{{ include "baton.fullname" . }}-api-key
{{- end }}
{{- end }}

{{- define "baton.apiKeyEnv" -}}
{{- with include "baton.apiKeySecret" . -}}
- name: BATON_API_KEY
  valueFrom: {secretKeyRef: {name: {{ . }}, key: key}}
{{- end }}
{{- end }}

{{/* Where a component finds Redis. In the environment: command lines are for all to see. Takes (root, user). */}}
{{- define "baton.redisEnv" -}}
{{- $redis := .root.Values.redis }}
{{- if $redis.enabled -}}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "baton.redisSecret" .root }}, key: {{ .user }}}}
- name: BATON_REDIS_URL
  value: {{ printf "%s://%s:$(REDIS_PASSWORD)@%s-redis:%d" (ternary "rediss" "redis" .root.Values.mtls.enabled) .user (include "baton.fullname" .root) (int $redis.port) }}
{{- else -}}
- name: BATON_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ required "redis.urlSecret must name a Secret when redis.enabled is false" $redis.urlSecret }}
      key: url
{{- end }}
{{- end }}

{{/* The volumes of gateways and workers. Takes (root, component). */}}
{{- define "baton.volumes" -}}
{{ include "baton.modelVolume" .root }}
- name: tmp
  emptyDir: {}
- name: kernels
  emptyDir: {}
- name: hub
  emptyDir: {}
{{- if .root.Values.mtls.enabled }}
{{ include "baton.secretVolume" (dict "volume" "mtls" "secret" (include "baton.mtlsSecret" .)) }}
{{- end }}
{{- if eq .component "gateway" }}
{{- if .root.Values.tls.enabled }}
{{ include "baton.secretVolume" (dict "volume" "tls" "secret" (include "baton.tlsSecret" .root)) }}
{{- end }}
{{- with .root.Values.keys.existingSecret }}
{{ include "baton.secretVolume" (dict "volume" "keys" "secret" .) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.volumeMounts" -}}
{{ include "baton.modelMount" .root }}
- {name: tmp, mountPath: /tmp}
- {name: kernels, mountPath: /var/cache/baton}
- {name: hub, mountPath: /var/cache/huggingface}
{{- if .root.Values.mtls.enabled }}
- {name: mtls, mountPath: /etc/baton/mtls, readOnly: true}
{{- end }}
{{- if eq .component "gateway" }}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/baton/tls, readOnly: true}
{{- end }}
{{- if .root.Values.keys.existingSecret }}
- {name: keys, mountPath: /etc/baton/keys, readOnly: true}
{{- end }}
{{- end }}
{{- end }}
