{{/*
The alerts, as YAML: a map of one list. docs/run/alerts.md has a section for each, by its name. Takes the root.

The first tokens' alerts go by how fast a budget is used up, in a long window and in a short one, so that they begin soon
and end soon (Site Reliability Workbook, chapter 5: 14.4 is 2 % of a month's budget in an hour, 6 is 5 % of it in 6 hours).
An objective is at least 0.95, by the schema: below 1 - 1 / 14.4 no share of late requests would be above the threshold.
*/}}
{{- define "baton.alerts" -}}
{{- $rules := .Values.monitoring.rules }}
{{- $series := include "baton.series" . }}
{{- $ofClients := printf "%s,%s" (include "baton.clients" .) $series }}
{{- $decodeWorkers := printf "baton_worker_info{role=\"decode\",%s}" $series }}
{{- $prefillWorkers := printf "baton_worker_info{role=\"prefill\",%s}" $series }}
{{- $loading := add .Values.workers.startupSeconds 300 }}
{{- $draining := add .Values.drainTimeoutSeconds 300 }}
{{- $budget := printf "(1 - %v)" $rules.ttftObjective }}
{{- $fast := printf "14.4 * %s" $budget }}
{{- $slow := printf "6 * %s" $budget }}
{{- $late := dict }}
{{- range list "5m" "30m" "1h" "6h" }}
{{- $record := include "baton.lateRecord" (dict "window" .) }}
{{- $_ := set $late . (printf "%s{namespace=%q,release=%q}" $record $.Release.Namespace $.Release.Name) }}
{{- end -}}
alerts:
  - alert: BatonNoGateway
    expr: absent(baton_requests_in_flight{ {{- $series -}} })
    for: 5m
    severity: critical
    summary: Prometheus gets metrics of no gateway. There is none, or none can be reached at its admin port.
  - alert: BatonGatewayDown
    expr: max by (pod) (up{ {{- $series -}} }) == 0
    for: 2m
    severity: warning
    summary: "{{ `{{ $labels.pod }}` }} does not answer at its admin port."
  # Two rules: the first worker of all takes minutes to load its model, and the loss of the last one is told at once.
  - alert: BatonNoDecodeWorker
    expr: absent({{ $decodeWorkers }}) and on() count(count_over_time({{ $decodeWorkers }}[1h]))
    for: 2m
    severity: critical
    summary: No gateway is connected to a decode worker any more. No request can be served.
  - alert: BatonNoDecodeWorkerYet
    expr: absent({{ $decodeWorkers }})
    for: {{ $loading }}s
    severity: critical
    summary: "No gateway has been connected to a decode worker for {{ $loading }} s, in which a model should be loaded."
  {{- if or .Values.autoscaling.kind .Values.prefill.replicas }}
  - alert: BatonNoPrefillWorker
    expr: absent({{ $prefillWorkers }}) and on() count({{ $decodeWorkers }})
    for: {{ $loading }}s
    severity: warning
    summary: No gateway is connected to a prefill worker. Decode workers compute all prompts, beside their answers.
  {{- end }}
  - alert: BatonWorkerRefused
    expr: max by (worker, why) (baton_worker_refused{ {{- $series -}} }) > 0
    for: 15m
    severity: warning
    summary: "{{ `{{ $labels.worker }}` }} does not fit the gateways: {{ `{{ $labels.why }}` }}."
  - alert: BatonDrainHangs
    expr: max by (worker) (baton_worker_draining{ {{- $series -}} }) > 0
    for: {{ $draining }}s
    severity: warning
    summary: "{{ `{{ $labels.worker }}` }} has been told to end, and has been draining for {{ $draining }} s and longer."
  - alert: BatonErrors
    expr: >-
      sum(rate(baton_requests_total{status=~"5..|UNAVAILABLE|INTERNAL",{{ $ofClients }}}[5m]))
      / sum(rate(baton_requests_total{ {{- $ofClients -}} }[5m])) > {{ $rules.errorRatio }}
    for: 5m
    severity: critical
    summary: "Of clients' requests, more than {{ $rules.errorRatio }} end in an error."
  - alert: BatonFirstTokensLate
    expr: {{ printf "%s > %s and %s > %s" (get $late "1h") $fast (get $late "5m") $fast | quote }}
    severity: critical
    summary: "Too many requests wait more than {{ $rules.ttftSeconds }} s for their first token: a month's budget lasts two days."
  - alert: BatonFirstTokensOftenLate
    expr: {{ printf "%s > %s and %s > %s" (get $late "6h") $slow (get $late "30m") $slow | quote }}
    severity: warning
    summary: "Many requests wait more than {{ $rules.ttftSeconds }} s for their first token: a month's budget lasts five days."
  - alert: BatonQueueLong
    expr: >-
      sum by (role) (max by (role, worker) (baton_worker_waiting{ {{- $series -}} }))
      > sum by (role) (max by (role, worker) (baton_worker_running{ {{- $series -}} }))
    for: 10m
    severity: warning
    summary: "At {{ `{{ $labels.role }}` }} workers more sequences wait than run."
  - alert: BatonRefusals
    expr: sum by (cause) (rate(baton_admission_refusals_total{cause!~"key_.*",{{ $series }}}[5m])) > 0
    for: 10m
    severity: warning
    summary: "Requests have been refused for ten minutes, since there is too much work: {{ `{{ $labels.cause }}` }}."
  - alert: BatonHandoffsFail
    expr: >-
      sum by (reason) (rate(baton_handoff_failures_total{ {{- $series -}} }[10m]))
      > 0.1 * scalar(sum(rate(baton_handoffs_total{ {{- $series -}} }[10m])))
    for: 10m
    severity: warning
    summary: "Handoffs fail: {{ `{{ $labels.reason }}` }}."
  - alert: BatonNoPair
    expr: >-
      sum(rate(baton_plans_total{why="no pair",{{ $series }}}[10m]))
      > 0.5 * sum(rate(baton_plans_total{ {{- $series -}} }[10m])) and on() count({{ $prefillWorkers }})
    for: 15m
    severity: warning
    summary: There are workers of both roles, and most requests find no pair of them.
  - alert: BatonBlocksQuarantined
    expr: max by (worker) (baton_blocks_quarantined{ {{- $series -}} }) > 0
    for: 30m
    severity: warning
    summary: "{{ `{{ $labels.worker }}` }} has KV blocks out of use: a read of them does not end."
  - alert: BatonNumbersNotFinite
    expr: sum by (worker) (increase(baton_worker_not_finite{ {{- $series -}} }[10m])) > 0
    severity: critical
    summary: "{{ `{{ $labels.worker }}` }} computes NaN or infinities. Its requests end in errors."
  - alert: BatonSuspectRequest
    # Or the first one of a gateway: a counter that appears has not increased.
    expr: >-
      sum(increase(baton_plans_total{why="suspect",{{ $series }}}[10m])) > 0
      or count((baton_plans_total{why="suspect",{{ $series }}} unless baton_plans_total{why="suspect",{{ $series }}} offset 10m)
      and on (pod) baton_requests_in_flight{ {{- $series -}} } offset 10m) > 0
    severity: warning
    summary: A request may end the workers that compute it. It is tried where it harms least, and refused after three.
  - alert: BatonRedisAway
    expr: max by (pod) (baton_limits_alone{ {{- $series -}} }) > 0
    for: 5m
    severity: warning
    summary: "{{ `{{ $labels.pod }}` }} does not reach Redis: it counts its part of the limits alone, and finds cached prefixes less often."
  - alert: BatonForeignEntries
    expr: sum by (pod) (increase(baton_index_malformed_entries{ {{- $series -}} }[10m])) > 0
    severity: warning
    summary: "{{ `{{ $labels.pod }}` }} finds entries in Redis that no worker writes."
  - alert: BatonFilesRefused
    expr: max by (pod, files) (baton_files_refused_seconds{ {{- $series -}} }) > 60
    severity: critical
    summary: "{{ `{{ $labels.pod }}` }} cannot use its newest {{ `{{ $labels.files }}` }}: revoked keys open, or certificates end."
  - alert: BatonGatewayStalls
    expr: >-
      histogram_quantile(0.99, sum by (le, pod) (rate(baton_gateway_loop_pause_seconds_bucket{ {{- $series -}} }[5m])))
      > 0.5
    for: 10m
    severity: warning
    summary: "{{ `{{ $labels.pod }}` }} holds up all its clients for half a second and longer."
  - alert: BatonGarbagePauses
    expr: >-
      max by (pod) (rate(baton_gateway_gc_pause_microseconds{ {{- $series -}} }[10m])) / 1e6 > 0.02
      or max by (worker) (rate(baton_worker_gc_pause_microseconds{ {{- $series -}} }[10m])) / 1e6 > 0.02
    for: 15m
    severity: warning
    summary: "{{ `{{ $labels.pod }}{{ $labels.worker }}` }} stands still for garbage collections, for more than 2 % of the time."
  - alert: BatonLogLinesDropped
    expr: sum by (pod) (increase(baton_gateway_log_lines_dropped{ {{- $series -}} }[10m])) > 0
    severity: warning
    summary: "{{ `{{ $labels.pod }}` }} cannot write its log lines: a disk is full, or nobody reads its output."
{{- end }}

{{/* Where the section on an alert is. Takes (root, alert). */}}
{{- define "baton.runbook" -}}
{{- with .root.Values.monitoring.rules.runbooks -}}
runbook_url: {{ printf "%s#%s" . ($.alert | lower) | quote }}
{{- else -}}
runbook: docs/run/alerts.md#{{ .alert | lower }}
{{- end }}
{{- end }}

{{/* Raises an error for a value that names no alert. Takes (without, alerts). */}}
{{- define "baton.checkAlerts" -}}
{{- $names := list }}
{{- range .alerts }}{{- $names = append $names .alert }}{{- end }}
{{- range .without }}
{{- if not (has . $names) }}{{- fail (printf "monitoring.rules.without: there is no alert %s here" .) }}{{- end }}
{{- end }}
{{- end }}
