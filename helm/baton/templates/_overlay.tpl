{{/*
Lays fields over those of a manifest, in place: whatever is laid over wins. Takes (base, over). Maps are merged, null removes
a field, and lists are replaced, but for those whose items have names. Of these, items with another name stay;
one with the same name is merged where it is a container or a port of a Service, and else replaced: a volume or variable
must not have two sources. For the same reason an action of a probe or hook removes the one that was there.
*/}}
{{- define "baton.overlay" -}}
{{- $base := .base }}
{{- $actions := list "exec" "grpc" "httpGet" "sleep" "tcpSocket" }}
{{- $merged := dict "containers" "name" "initContainers" "name" "ports" "name" }}
{{- $kept := merge (dict "env" "name" "volumes" "name" "volumeMounts" "mountPath") $merged }}
{{- range $field, $value := .over }}
{{- $there := index $base $field }}
{{- if kindIs "invalid" $value }}
{{- $_ := unset $base $field }}
{{- else if and (kindIs "map" $value) (kindIs "map" $there) }}
{{- include "baton.overlay" (dict "base" $there "over" $value) }}
{{- else if and (hasKey $kept $field) (kindIs "slice" $value) (kindIs "slice" $there) }}
{{- $by := index $kept $field }}
{{- $items := list }}
{{- $names := list }}
{{- range $item := $there }}
{{- $laid := $item }}
{{- range $each := $value }}
{{- if eq (index $each $by | toString) (index $item $by | toString) }}
{{- if hasKey $merged $field }}
{{- include "baton.overlay" (dict "base" $item "over" $each) }}
{{- else }}
{{- $laid = $each }}
{{- end }}
{{- end }}
{{- end }}
{{- $items = append $items $laid }}
{{- $names = append $names (index $item $by | toString) }}
{{- end }}
{{- range $each := $value }}
{{- if not (has (index $each $by | toString) $names) }}{{- $items = append $items $each }}{{- end }}
{{- end }}
{{- $_ := set $base $field $items }}
{{- else }}
{{- $_ := set $base $field $value }}
{{- end }}
{{- if and (has $field $actions) (hasKey $base $field) }}
{{- range without $actions $field }}{{- $_ := unset $base . }}{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/*
The spec of pods with what values lay over it. Takes (spec, values): as YAML, whose first container is the component's, and
the values of the component.
*/}}
{{- define "baton.podSpec" -}}
{{- $spec := fromYaml .spec }}
{{- with $spec.Error }}{{ fail . }}{{ end }}
{{- $values := deepCopy .values }}
{{- $container := dict }}
{{- with $values.envFrom }}{{- $_ := set $container "envFrom" . }}{{- end }}
{{- range $name, $fields := $values.probes }}{{- $_ := set $container (printf "%sProbe" $name) $fields }}{{- end }}
{{- range $over := list $container $values.containerSpec }}
{{- include "baton.overlay" (dict "base" (first $spec.containers) "over" $over) }}
{{- end }}
{{- $pod := dict }}
{{- with $values.sidecars }}{{- $_ := set $pod "containers" . }}{{- end }}
{{- range $field := list "initContainers" "priorityClassName" "runtimeClassName" }}
{{- with index $values $field }}{{- $_ := set $pod $field . }}{{- end }}
{{- end }}
{{- range $over := list $pod $values.podSpec }}
{{- include "baton.overlay" (dict "base" $spec "over" $over) }}
{{- end }}
{{- toYaml $spec }}
{{- end }}
