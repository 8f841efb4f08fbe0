{{/* The issuer of a certificate: the one that is named, or the release's own CA. Takes (root, issuerRef). */}}
{{- define "baton.issuerRef" -}}
{{- with .issuerRef }}
{{- toYaml . }}
{{- else }}
{kind: Issuer, name: {{ include "baton.fullname" .root }}-ca}
{{- end }}
{{- end }}

{{/* "true" where a certificate is made whose issuer nobody named. */}}
{{- define "baton.ownCa" -}}
{{- if or (and .Values.mtls.enabled (not .Values.mtls.issuerRef)) (and .Values.tls.enabled (not .Values.tls.existingSecret) (not .Values.tls.issuerRef)) }}true{{ end }}
{{- end }}

{{/* What all certificates have in common; a renewed one has a new private key. Takes the root. */}}
{{- define "baton.certificate" -}}
duration: {{ .Values.certificates.duration }}
renewBefore: {{ .Values.certificates.renewBefore }}
privateKey: {algorithm: ECDSA, size: 256, rotationPolicy: Always}
{{- end }}

{{/* Names under which a Service is found inside the cluster. Takes (root, service). */}}
{{- define "baton.serviceNames" -}}
{{- $local := printf "%s.%s" .service .root.Release.Namespace -}}
- {{ .service }}
- {{ $local }}
- {{ $local }}.svc
- {{ $local }}.svc.cluster.local
{{- end }}

{{/* A name for which the certificate that clients see is good: of a wildcard, one that it covers. */}}
{{- define "baton.tlsName" -}}
{{- if .Values.tls.dnsNames }}{{ first .Values.tls.dnsNames | replace "*" "baton" }}{{ else }}{{ include "baton.fullname" . }}{{ end }}
{{- end }}
