{{/* The checks of values that contradict each other; what they find, nothing is rendered with. */}}
{{- define "baton.check" -}}
{{- include "baton.checkSources" . }}
{{- include "baton.checkNumbers" . }}
{{- include "baton.checkResources" . }}
{{- include "baton.checkGpus" . }}
{{- include "baton.checkGroups" . }}
{{- include "baton.checkPorts" . }}
{{- include "baton.checkService" . }}
{{- include "baton.checkRoutes" . }}
{{- end }}

{{/* Where model, keys, certificates and accounts come from. */}}
{{- define "baton.checkSources" -}}
{{- with .Values }}
{{- if not (or .allowPlaintext .mtls.enabled) }}
{{- fail "allowPlaintext is false: set mtls.enabled, by which workers and gateways speak TLS" }}
{{- end }}
{{- if and .keys.allowAnonymous (or .keys.existingSecret .keys.apiKeySecret) }}
{{- fail "keys.allowAnonymous says that there are no keys: leave out keys.existingSecret and keys.apiKeySecret" }}
{{- end }}
{{- if and .model.hub.id .model.hostPath }}
{{- fail "model.hub.id and model.hostPath both say where the model comes from: leave out one of them" }}
{{- end }}
{{- if and .model.cache.size (not .model.hub.id) }}
{{- fail "model.cache.size is for a model from the hub: name one with model.hub.id" }}
{{- end }}
{{- if and .tls.enabled .tls.issuerRef (not .tls.dnsNames) }}
{{- fail "tls.dnsNames must have the names that tls.issuerRef is to sign" }}
{{- end }}
{{- if and .tls.existingSecret .tls.issuerRef }}
{{- fail "tls.existingSecret and tls.issuerRef both say where the certificate comes from: leave out one of them" }}
{{- end }}
{{- if not (or .serviceAccount.create .serviceAccount.name) }}
{{- fail "serviceAccount.create is false: serviceAccount.name must be one of your own" }}
{{- end }}
{{- end }}
{{- if and (include "baton.modelCached" .) (eq .Values.model.cache.accessMode "ReadWriteOnce") }}
{{- $nodes := list }}
{{- range $component := list "gateway" "prefill" "decode" }}
{{- $nodes = append $nodes (index (index $.Values $component).nodeSelector "kubernetes.io/hostname" | default "") }}
{{- end }}
{{- if or (has "" $nodes) (gt (len (uniq $nodes)) 1) }}
{{- fail "model.cache.accessMode is ReadWriteOnce: only pods of one node can read it. Set ReadWriteMany, or the same kubernetes.io/hostname in the nodeSelector of gateway, prefill and decode" }}
{{- end }}
{{- end }}
{{- end }}

{{/* Numbers of pods, and times. */}}
{{- define "baton.checkNumbers" -}}
{{- with .Values.autoscaling }}
{{- if and (eq .kind "keda") (not .prometheus) }}
{{- fail "autoscaling.prometheus must be the URL of a Prometheus, which KEDA asks" }}
{{- end }}
{{- if and (eq .kind "hpa") (not $.Values.monitoring.rules.enabled) }}
{{- fail "autoscaling.kind hpa asks for records of Prometheus: set monitoring.rules.enabled" }}
{{- end }}
{{- range $component := list "gateway" "prefill" "decode" }}
{{- with index $.Values.autoscaling $component }}
{{- if and $.Values.autoscaling.kind (gt (int .minReplicas) (int .maxReplicas)) }}
{{- fail (printf "autoscaling.%s.minReplicas is %d, above maxReplicas, which is %d" $component (int .minReplicas) (int .maxReplicas)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.certificates }}
{{- if ge (include "baton.seconds" .renewBefore | float64) (include "baton.seconds" .duration | float64) }}
{{- fail (printf "certificates.renewBefore is %s, not less than certificates.duration, which is %s" .renewBefore .duration) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Memory and CPU: a request must not be above its limit, nor what a process is told to take. */}}
{{- define "baton.checkResources" -}}
{{- $all := dict "gateway" .Values.gateway "prefill" .Values.prefill "decode" .Values.decode }}
{{- if .Values.redis.enabled }}{{- $_ := set $all "redis" .Values.redis }}{{- end }}
{{- if include "baton.modelCached" . }}{{- $_ := set $all "model.cache" .Values.model.cache }}{{- end }}
{{- range $path, $values := $all }}
{{- $limits := $values.resources.limits | default dict }}
{{- range $resource, $asked := $values.resources.requests }}
{{- $limit := index $limits $resource }}
{{- if and $asked $limit (gt (include "baton.amount" $asked | float64) (include "baton.amount" $limit | float64)) }}
{{- fail (printf "%s.resources.requests.%s is %v, above the limit, which is %v" $path $resource $asked $limit) }}
{{- end }}
{{- end }}
{{- $taken := "" }}
{{- $pods := 1 }}
{{- if eq $path "redis" }}
{{- $taken = $values.maxMemory }}
{{- else if and (has $path (list "prefill" "decode")) (not (include "baton.onGpu" (dict "root" $ "component" $path))) }}
{{- $taken = include "baton.kvMemory" (dict "root" $ "component" $path) }}
{{- $pods = include "baton.nodes" (dict "root" $ "component" $path) | int }}
{{- end }}
{{- if and $taken $limits.memory (ge (divf (include "baton.amount" $taken | float64) $pods) (include "baton.amount" $limits.memory | float64)) }}
{{- $what := ternary "redis.maxMemory" (printf "%s.kvMemory" $path) (eq $path "redis") }}
{{- if gt $pods 1 }}{{- $what = printf "%s (of %d pods together)" $what $pods }}{{- end }}
{{- fail (printf "%s is %s, and %s.resources.limits.memory, which must have room for it and more, is %v" $what $taken $path $limits.memory) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Workers that are several pods. */}}
{{- define "baton.checkGroups" -}}
{{- range $role := list "prefill" "decode" }}
{{- with index $.Values $role }}
{{- $nodes := int .nodesPerWorker }}
{{- if and (gt $nodes 1) (ne (int .tensorParallelSize) $nodes) }}
{{- fail (printf "%s.nodesPerWorker is %d, and a pod has one process of a worker then: %s.tensorParallelSize, which is %d, must be the same" $role $nodes $role (int .tensorParallelSize)) }}
{{- end }}
{{- if and (gt $nodes 1) .gpus }}
{{- fail (printf "%s.nodesPerWorker is %d, and %s.gpus asks for GPUs: a worker on several nodes is for CPUs so far" $role $nodes $role) }}
{{- end }}
{{- if and .exclusiveTopology (le $nodes 1) }}
{{- fail (printf "%s.exclusiveTopology is for workers of several pods, and %s.nodesPerWorker is 1" $role $role) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.checkGpus" -}}
{{- $device := .Values.workers.device }}
{{- range $role := list "prefill" "decode" }}
{{- with index $.Values $role }}
{{- if and .gpus (eq $device "cpu") }}
{{- fail (printf "%s.gpus asks for GPUs, and workers.device is cpu" $role) }}
{{- end }}
{{- if gt (int .gpus) 1 }}
{{- fail (printf "%s.gpus is %d, and a worker uses one GPU: set %s.replicas, which is the number of workers" $role (int .gpus) $role) }}
{{- end }}
{{- if and (eq $device "cuda") (not (or .gpus .runtimeClassName .podSpec .containerSpec)) }}
{{- fail (printf "workers.device is cuda, and nothing gives a GPU to the pods of %s: set %s.gpus to 1, or what else does in runtimeClassName, podSpec or containerSpec" $role $role) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.workers.rdma.resource (eq .Values.workers.transport "grpc") }}
{{- fail "workers.rdma.resource is for nixl, and workers.transport is grpc" }}
{{- end }}
{{- end }}

{{/* Two servers of a pod at one port. */}}
{{- define "baton.checkPorts" -}}
{{- $pods := list (dict "gateway.port" .Values.gateway.port "gateway.grpcPort" .Values.gateway.grpcPort "gateway.adminPort" .Values.gateway.adminPort) }}
{{- range $role := list "prefill" "decode" }}
{{- $ports := dict (printf "%s.port" $role) (index $.Values $role).port }}
{{- if $.Values.mtls.enabled }}{{- $_ := set $ports "workers.healthPort" $.Values.workers.healthPort }}{{- end }}
{{- if include "baton.inGroups" (dict "root" $ "component" $role) }}{{- $_ := set $ports "workers.groupPort" $.Values.workers.groupPort }}{{- end }}
{{- $pods = append $pods $ports }}
{{- end }}
{{- range $pods }}
{{- $taken := dict }}
{{- range $path, $port := . }}
{{- $number := $port | int | toString }}
{{- with index $taken $number }}{{- fail (printf "%s and %s are both %s" . $path $number) }}{{- end }}
{{- $_ := set $taken $number $path }}
{{- end }}
{{- end }}
{{- end }}

{{/* How the gateways are reached. */}}
{{- define "baton.checkService" -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.monitoring) (ne .Values.monitoring.monitor "none") }}
{{- fail (printf "monitoring.monitor is %s, and networkPolicy.monitoring lets nobody reach the metrics" .Values.monitoring.monitor) }}
{{- end }}
{{- with .Values.gateway.service }}
{{- $type := .type }}
{{- range $field, $types := dict "loadBalancerClass" (list "LoadBalancer") "loadBalancerSourceRanges" (list "LoadBalancer") "externalTrafficPolicy" (list "LoadBalancer" "NodePort") }}
{{- if and (index $.Values.gateway.service $field) (not (has $type $types)) }}
{{- fail (printf "gateway.service.%s is for the type %s, and gateway.service.type is %s" $field (join " or " $types) $type) }}
{{- end }}
{{- end }}
{{- $nodePorts := compact (list .nodePorts.http .nodePorts.grpc) }}
{{- if and $nodePorts (eq $type "ClusterIP") }}
{{- fail "gateway.service.nodePorts are for the type LoadBalancer or NodePort, and gateway.service.type is ClusterIP" }}
{{- end }}
{{- if ne (len $nodePorts) (len (uniq $nodePorts)) }}
{{- fail (printf "gateway.service.nodePorts.http and gateway.service.nodePorts.grpc are both %d" (int .nodePorts.http)) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.checkRoutes" -}}
{{- $http := .Values.httpRoute }}
{{- $grpc := .Values.grpcRoute }}
{{- range $name, $route := dict "httpRoute" $http "grpcRoute" $grpc }}
{{- if and $route.enabled (not $route.parentRefs) }}
{{- fail (printf "%s.parentRefs must name a Gateway" $name) }}
{{- end }}
{{- end }}
{{- if and $http.enabled $grpc.enabled (eq (toJson $http.parentRefs) (toJson $grpc.parentRefs)) }}
{{- $shared := not (and $http.hostnames $grpc.hostnames) }}
{{- range $http.hostnames }}{{- if has . $grpc.hostnames }}{{- $shared = true }}{{- end }}{{- end }}
{{- if $shared }}
{{- fail "httpRoute and grpcRoute have a hostname in common, and a listener of a Gateway takes it from one kind of route alone: give grpcRoute hostnames or parentRefs of its own" }}
{{- end }}
{{- end }}
{{- end }}

{{/*
Further arguments must not say once more what the chart says: of two ports, the Service would lead to the wrong one.
Takes (root, component, further, pod): a list, and the spec of the pod, whose container's arguments end with it.
*/}}
{{- define "baton.checkArgs" -}}
{{- $part := ternary "gateway" "worker" (eq .component "gateway") }}
{{- $values := index (.root.Files.Get "files/flags.json" | fromJson) $part }}
{{- $args := (first (fromYaml .pod).containers).args }}
{{- $given := list }}
{{- range slice $args 0 (sub (len $args) (len .further) | int) }}{{- $given = append $given (regexFind "^--[^=]*" .) }}{{- end }}
{{- range .further }}
{{- $flag := regexFind "^--[^=]*" . }}
{{- if and $flag (has $flag $given) }}
{{- $value := index $values $flag | replace "ROLE" $.component }}
{{- fail (printf "extraArgs of %s has %s, which the chart gives already: by %s" $.component $flag $value) }}
{{- end }}
{{- end }}
{{- end }}

{{/* A quantity of Kubernetes, or an amount of memory as Baton or Redis writes it, as a number. */}}
{{- define "baton.amount" -}}
{{- $units := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 }}
{{- $units = merge $units (dict "B" 1 "KB" 1e3 "MB" 1e6 "GB" 1e9 "KiB" 1024 "MiB" 1048576 "GiB" 1073741824) }}
{{- $units = merge $units (dict "kb" 1024 "mb" 1048576 "gb" 1073741824 "g" 1e9) }}
{{- $text := toString . | replace " " "" }}
{{- $unit := regexFind "[A-Za-z]*$" $text }}
{{- mulf (trimSuffix $unit $text | float64) (index $units $unit | default 1 | float64) }}
{{- end }}

{{/* Seconds of a duration, such as 1h30m. */}}
{{- define "baton.seconds" -}}
{{- $seconds := 0 }}
{{- range regexFindAll "[0-9]+[hms]" . -1 }}
{{- $number := regexFind "[0-9]+" . | int }}
{{- $seconds = add $seconds (mul $number (index (dict "h" 3600 "m" 60 "s" 1) (regexFind "[hms]" .))) }}
{{- end }}
{{- $seconds }}
{{- end }}
