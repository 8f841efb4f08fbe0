{{/* The head of a policy for a component's pods. Takes (root, component). */}}
{{- define "baton.policy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {{- include "baton.metadata" . | nindent 2 }}
spec:
  podSelector:
    matchLabels: {{- include "baton.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
{{- end }}

{{/* The pods of a component. Takes (root, component). */}}
{{- define "baton.pods" -}}
- podSelector:
    matchLabels: {{- include "baton.selector" . | nindent 6 }}
{{- end }}

{{- define "baton.toDns" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
{{- end }}

{{/* Takes the root. */}}
{{- define "baton.toRedis" -}}
{{- if .Values.redis.enabled -}}
- to: {{- include "baton.pods" (dict "root" . "component" "redis") | nindent 4 }}
  ports: [{port: redis}]
{{- else -}}
{{ toYaml .Values.networkPolicy.redisEgress }}
{{- end }}
{{- end }}

{{/* To the hub, where pods fetch the model themselves. */}}
{{- define "baton.toHub" -}}
{{- if include "baton.modelFetched" . -}}
{{ toYaml .Values.networkPolicy.hubEgress }}
{{- end }}
{{- end }}
