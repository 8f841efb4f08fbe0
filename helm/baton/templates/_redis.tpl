{{/*
The start of Redis. What it is to know goes in through standard input, since command lines are for all to see. Gateways and
workers are users of their own, with the commands that they send and the keys that they have business with: a worker reads
no kept response. Passwords are letters and digits.
*/}}
{{- define "baton.redisScript" -}}
{{- $tls := "/etc/baton/mtls" }}
{{- $port := .Values.redis.port | int -}}
{{ if .Values.mtls.enabled -}}
# Redis reads its certificates once: it is told when they are renewed.
RELOADER=$(head -c 32 /dev/urandom | sha256sum | cut -c 1-64)
touch /tmp/loaded
while sleep 20; do
  [ {{ $tls }}/tls.crt -nt /tmp/loaded ] || continue
  touch /tmp/seen
  REDISCLI_AUTH=$RELOADER redis-cli --user reloader {{ include "baton.redisCliArgs" . }} config set \
    tls-cert-file {{ $tls }}/tls.crt tls-key-file {{ $tls }}/tls.key tls-ca-cert-file {{ $tls }}/ca.crt &&
    mv /tmp/seen /tmp/loaded
done &
{{ end -}}
exec redis-server - <<END
{{- if .Values.mtls.enabled }}
port 0
tls-port {{ $port }}
tls-protocols TLSv1.3
tls-cert-file {{ $tls }}/tls.crt
tls-key-file {{ $tls }}/tls.key
tls-ca-cert-file {{ $tls }}/ca.crt
{{- else }}
port {{ $port }}
{{- end }}
dir {{ ternary "/data" "/tmp" (ne .Values.redis.persistence.size "") }}
save ""
appendonly {{ ternary "yes" "no" (ne .Values.redis.persistence.size "") }}
maxmemory {{ .Values.redis.maxMemory }}
maxmemory-policy allkeys-lru
user default off
user probe on nopass -@all +ping
{{- if .Values.mtls.enabled }}
user reloader on >$RELOADER -@all +config|set
{{- end }}
user gateway on >$GATEWAY_PASSWORD ~baton:index:* ~baton:{workers}:* ~baton:response:* ~baton:response-lease:* ~baton:limits:* -@all {{ include "baton.redisGatewayCommands" . }}
user worker on >$WORKER_PASSWORD ~baton:index:* ~baton:{workers}:* -@all {{ include "baton.redisWorkerCommands" . }}
END
{{- end }}

{{- define "baton.redisGatewayCommands" -}}
+ping +select +evalsha +script|load +time +hget +zrangebyscore +get +set +del +exists +pexpire
{{- end }}

{{- define "baton.redisWorkerCommands" -}}
+ping +select +evalsha +script|load +time +hget +hset +hdel +hscan +zadd +zrem +zscore +zrangebyscore +sadd +srem +smembers +scan +set +expire +del
{{- end }}

{{- define "baton.redisCliArgs" -}}
-p {{ .Values.redis.port | int }}
{{- if .Values.mtls.enabled }} --tls --cacert /etc/baton/mtls/ca.crt --cert /etc/baton/mtls/tls.crt --key /etc/baton/mtls/tls.key{{ end }}
{{- end }}
