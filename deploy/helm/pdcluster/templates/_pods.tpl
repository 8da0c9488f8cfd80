{{/* The specs of the pods, each before what the user merges into it. */}}

{{/* A node's. Takes the root and the pool. */}}
{{- define "pdcluster.nodePod" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $is_vllm := eq $pool.engine "vllm" -}}
{{- $image := include "pdcluster.image" (dict "root" $root "name" ($pool.image | default (ternary $root.Values.image.vllm $root.Values.image.node $is_vllm))) -}}
{{- $host := include "pdcluster.podHost" $root -}}
{{- $ports := $pool.ports -}}
{{- $has_tcp := and (not $is_vllm) (has (get $pool.settings "node.transfer.backend" | default "auto") (list "auto" "tcp")) -}}
{{- $is_mounted := or $root.Values.model.pvc.claim $root.Values.model.hostPath.path $root.Values.model.image.reference -}}
{{- $own := dict "node.role" $pool.role "node.name" "$(POD_NAME)" "node.bootstrap" (include "pdcluster.bootstraps" $root) -}}
{{- $_ := set $own "node.listen" (printf "%s:%d" $host (int64 $ports.node)) -}}
{{- $_ := set $own "node.health" (printf "%s:%d" (include "pdcluster.anyHost" $root) (int64 $ports.health)) -}}
{{- $_ := set $own "node.transfer.host" "$(POD_IP)" -}}
{{- if $has_tcp }}{{ $_ := set $own "node.transfer.port" $ports.transfer }}{{ end -}}
{{- $_ := set $own "node.engine" $pool.engine -}}
{{- if $is_vllm -}}
{{- $_ := set $own "node.vllm.side_port" $pool.ports.transfer -}}
{{- $_ := set $own "node.vllm.start_s" (mul (int64 $pool.startupMinutes) 60) -}}
{{- else -}}
{{- $_ := set $own "node.tp" $pool.tp -}}
{{- end -}}
{{- $_ := set $own "node.drain_s" $pool.drainSeconds -}}
{{- with $root.Values.model.servedName }}{{ $_ := set $own "node.served_model_name" . }}{{ end -}}
{{- if $is_mounted -}}
{{- $_ := set $own "node.model" (include "pdcluster.modelPath" $root) -}}
{{- else if $root.Values.model.hub.name -}}
{{- $_ := set $own "node.model" $root.Values.model.hub.name -}}
{{- end -}}
{{- if $root.Values.auth.clusterKey.existingSecret }}{{ $_ := set $own "node.security.cluster_key_file" (printf "/etc/pdcluster/cluster/%s" $root.Values.auth.clusterKey.key) }}{{ end -}}
{{ include "pdcluster.podBase" (dict "root" $root "places" $pool) }}
terminationGracePeriodSeconds: {{ add (int64 $pool.drainSeconds) (ternary 30 10 $is_vllm) }}
{{- if $pool.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with $pool.priorityClassName }}
priorityClassName: {{ toJson . }}
{{- end }}
{{- with $pool.runtimeClassName }}
runtimeClassName: {{ toJson . }}
{{- end }}
{{- if $root.Values.model.pvc.fill.enabled }}
initContainers:
  # The Job that fills the claim moves the model there when it is whole.
  - name: model
    image: {{ $image }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    args:
      - sh
      - -c
      - 'n=0; until [ -d "$0" ]; do [ "$n" -lt "$1" ] || { echo "no model in $0 after $1 s; look at the Job that fills it" >&2; exit 1; }; n=$((n+5)); sleep 5; done'
      - {{ include "pdcluster.modelPath" $root | toJson }}
      - {{ mul (int64 $pool.startupMinutes) 60 | toString | toJson }}
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 64Mi}
    securityContext:
      {{- include "pdcluster.containerSecurity" (dict) | nindent 6 }}
    volumeMounts:
      - {name: cache, mountPath: /cache}
      - {name: model, mountPath: /model, readOnly: true}
{{- end }}
containers:
  - name: node
    image: {{ $image }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    args:
      - pdcluster
      - node
      {{- include "pdcluster.settingsArgs" (dict "root" $root "section" "node" "own" $own "given" $pool.settings "where" (printf "pool %s" $pool.name)) | nindent 6 }}
      {{- if and $is_vllm $pool.vllm.args }}
      - --
      {{- range $pool.vllm.args }}
      - {{ include "pdcluster.text" . | toJson }}
      {{- end }}
      {{- end }}
    env:
      {{- include "pdcluster.env" $root | nindent 6 }}
      {{- if and $root.Values.model.hub.name (not $is_mounted) }}
      {{- include "pdcluster.hubEnv" $root | nindent 6 }}
      {{- end }}
      {{- if and (include "pdcluster.asksRouters" $pool) $root.Values.auth.scalerToken.existingSecret }}
      # KEDA reads it here: a trigger can name variables of what it scales, and no Secret.
      - name: SCALER_TOKEN
        valueFrom: {secretKeyRef: {name: {{ toJson $root.Values.auth.scalerToken.existingSecret }}, key: {{ toJson $root.Values.auth.scalerToken.key }}}}
      {{- end }}
      {{- with $pool.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    ports:
      - {name: node, containerPort: {{ int64 $ports.node }}}
      - {name: health, containerPort: {{ int64 $ports.health }}}
      {{- if $is_vllm }}
      - {name: side, containerPort: {{ int64 $ports.transfer }}}
      {{- end }}
      {{- if $has_tcp }}
      {{- range until (int $pool.tp) }}
      - {name: transfer-{{ . }}, containerPort: {{ add (int64 $ports.transfer) . }}}
      {{- end }}
      {{- end }}
    {{- include "pdcluster.probes" (dict "startup" "readyz" "minutes" $pool.startupMinutes) | nindent 4 }}
    {{- $resources := deepCopy $pool.resources }}
    {{- range $device, $count := $pool.devices }}
    {{- $_ := set $resources "limits" (set (deepCopy ($resources.limits | default dict)) $device (int64 $count | toString)) }}
    {{- $_ := set $resources "requests" (set (deepCopy ($resources.requests | default dict)) $device (int64 $count | toString)) }}
    {{- end }}
    resources:
      {{- toYaml $resources | nindent 6 }}
    securityContext:
      {{- include "pdcluster.containerSecurity" (dict "add" (ternary (list "IPC_LOCK") list $pool.infiniband)) | nindent 6 }}
    volumeMounts:
      - {name: cache, mountPath: /cache}
      - {name: tmp, mountPath: /tmp}
      {{- if $is_vllm }}
      - {name: shm, mountPath: /dev/shm}
      {{- end }}
      {{- if $is_mounted }}
      - {name: model, mountPath: /model, readOnly: true}
      {{- end }}
      {{- if $root.Values.auth.clusterKey.existingSecret }}
      - {name: cluster-key, mountPath: /etc/pdcluster/cluster, readOnly: true}
      {{- end }}
      {{- if $pool.infiniband }}
      - {name: infiniband, mountPath: /dev/infiniband}
      {{- end }}
volumes:
  - {name: cache, emptyDir: {sizeLimit: {{ toJson $root.Values.cache.size }}}}
  - {name: tmp, emptyDir: {}}
  {{- if $is_vllm }}
  - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ toJson $pool.vllm.shmSize }}}}
  {{- end }}
  {{- with $root.Values.model.pvc.claim }}
  - {name: model, persistentVolumeClaim: {claimName: {{ toJson . }}, readOnly: true}}
  {{- end }}
  {{- with $root.Values.model.hostPath.path }}
  - {name: model, hostPath: {path: {{ toJson . }}, type: Directory}}
  {{- end }}
  {{- with $root.Values.model.image.reference }}
  - {name: model, image: {reference: {{ toJson . }}, pullPolicy: IfNotPresent}}
  {{- end }}
  {{- with $root.Values.auth.clusterKey.existingSecret }}
  - {name: cluster-key, secret: {secretName: {{ toJson . }}, defaultMode: 288}}
  {{- end }}
  {{- if $pool.infiniband }}
  - {name: infiniband, hostPath: {path: /dev/infiniband, type: Directory}}
  {{- end }}
{{- end -}}

{{/* Where a mounted model is in a container. */}}
{{- define "pdcluster.modelPath" -}}
{{- $path := ternary .Values.model.image.path "" (ne .Values.model.image.reference "") -}}
{{- if .Values.model.pvc.claim }}{{ $path = .Values.model.pvc.path }}{{ end -}}
{{- printf "/model/%s" $path | trimSuffix "/" -}}
{{- end -}}

{{- define "pdcluster.hubEnv" -}}
- {name: HF_HOME, value: /cache/huggingface}
{{- with .Values.model.hub.endpoint }}
- {name: HF_ENDPOINT, value: {{ toJson . }}}
{{- end }}
{{- with .Values.model.hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ toJson . }}, key: token}}
{{- end }}
{{- end -}}

{{/* That of the Job which fills a claim with a model of the hub. */}}
{{- define "pdcluster.fillPod" -}}
{{ include "pdcluster.podBase" (dict "root" . "places" dict) }}
restartPolicy: OnFailure
containers:
  - name: fill
    image: {{ include "pdcluster.image" (dict "root" . "name" (ternary .Values.image.vllm .Values.image.node (eq (include "pdcluster.engine" .) "vllm"))) }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    args: [python3, -m, pdcluster.launch.fill, {{ toJson .Values.model.hub.name }}, {{ include "pdcluster.modelPath" . | toJson }}]
    env:
      {{- include "pdcluster.env" . | nindent 6 }}
      {{- include "pdcluster.hubEnv" . | nindent 6 }}
    resources:
      {{- toYaml .Values.model.pvc.fill.resources | nindent 6 }}
    securityContext:
      {{- include "pdcluster.containerSecurity" (dict) | nindent 6 }}
    volumeMounts:
      - {name: cache, mountPath: /cache}
      - {name: tmp, mountPath: /tmp}
      - {name: model, mountPath: /model}
volumes:
  - {name: cache, emptyDir: {sizeLimit: 1Gi}}
  - {name: tmp, emptyDir: {}}
  - {name: model, persistentVolumeClaim: {claimName: {{ toJson .Values.model.pvc.claim }}}}
{{- end -}}

{{/* Has nodes serve other weights, as an operator would. */}}
{{- define "pdcluster.weightsPod" -}}
{{ include "pdcluster.podBase" (dict "root" . "places" dict) }}
restartPolicy: OnFailure
containers:
  - name: weights
    image: {{ include "pdcluster.image" (dict "root" . "name" .Values.image.router) }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    args:
      - pdctl
      - weights
      - load
      - --admin={{ include "pdcluster.name" . }}-admin:50052
      {{- if .Values.auth.adminToken.existingSecret }}
      - --token-file=/etc/pdcluster/admin/{{ .Values.auth.adminToken.key }}
      {{- end }}
      - --label={{ .Values.weights.label }}
      - --max-unavailable={{ int64 .Values.weights.maxUnavailable }}
      {{- with .Values.weights.canaryPercent }}
      - --canary={{ . }}%
      {{- end }}
      {{- if .Values.weights.releaseFirst }}
      - --release-first
      {{- end }}
      - --
      - {{ toJson .Values.weights.source }}
    env:
      {{- include "pdcluster.env" . | nindent 6 }}
    resources:
      requests: {cpu: 10m, memory: 64Mi}
      limits: {memory: 256Mi}
    securityContext:
      {{- include "pdcluster.containerSecurity" (dict) | nindent 6 }}
    volumeMounts:
      - {name: cache, mountPath: /cache}
      {{- if .Values.auth.adminToken.existingSecret }}
      - {name: admin, mountPath: /etc/pdcluster/admin, readOnly: true}
      {{- end }}
volumes:
  - {name: cache, emptyDir: {sizeLimit: 64Mi}}
  {{- with .Values.auth.adminToken.existingSecret }}
  - {name: admin, secret: {secretName: {{ toJson . }}, defaultMode: 288}}
  {{- end }}
{{- end -}}

{{- define "pdcluster.bootstrapPod" -}}
{{- $own := dict "bootstrap.listen" (printf "%s:8998" (include "pdcluster.anyHost" .)) "bootstrap.lease_s" .Values.bootstrap.leaseSeconds -}}
{{- $_ := set $own "bootstrap.health" (printf "%s:8080" (include "pdcluster.anyHost" .)) -}}
{{- if .Values.auth.clusterKey.existingSecret -}}
{{- $_ := set $own "bootstrap.security.cluster_key_file" (printf "/etc/pdcluster/cluster/%s" .Values.auth.clusterKey.key) -}}
{{- end -}}
{{ include "pdcluster.podBase" (dict "root" . "places" .Values.bootstrap) }}
containers:
  - name: bootstrap
    image: {{ include "pdcluster.image" (dict "root" . "name" .Values.image.router) }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    args:
      - pdcluster
      - bootstrap
      {{- include "pdcluster.settingsArgs" (dict "root" . "section" "bootstrap" "own" $own "given" .Values.bootstrap.settings "where" "bootstrap.settings") | nindent 6 }}
    env:
      {{- include "pdcluster.env" . | nindent 6 }}
    ports:
      - {name: registry, containerPort: 8998}
      - {name: health, containerPort: 8080}
    {{- include "pdcluster.probes" (dict "startup" "livez" "minutes" 2) | nindent 4 }}
    resources:
      {{- toYaml .Values.bootstrap.resources | nindent 6 }}
    securityContext:
      {{- include "pdcluster.containerSecurity" (dict) | nindent 6 }}
    volumeMounts:
      - {name: cache, mountPath: /cache}
      {{- if .Values.auth.clusterKey.existingSecret }}
      - {name: cluster-key, mountPath: /etc/pdcluster/cluster, readOnly: true}
      {{- end }}
volumes:
  - {name: cache, emptyDir: {sizeLimit: 64Mi}}
  {{- with .Values.auth.clusterKey.existingSecret }}
  - {name: cluster-key, secret: {secretName: {{ toJson . }}, defaultMode: 288}}
  {{- end }}
{{- end -}}

{{- define "pdcluster.routerPod" -}}
{{- $token := .Values.auth.adminToken.existingSecret -}}
{{- $scaled := include "pdcluster.scaled" . -}}
{{- $any := include "pdcluster.anyHost" . -}}
{{- $admin := include "pdcluster.isReached" (dict "root" . "surface" "admin") -}}
{{- $console := include "pdcluster.isReached" (dict "root" . "surface" "console") -}}
{{- $scalerToken := ternary .Values.auth.scalerToken.existingSecret "" (ne $scaled "") -}}
{{- $own := dict "router.name" "$(POD_NAME)" "router.bootstrap" (include "pdcluster.bootstraps" .) -}}
{{- $_ := set $own "router.http" (printf "%s:8000" $any) -}}
{{- $_ := set $own "router.grpc" (printf "%s:50051" $any) -}}
{{- $_ := set $own "router.health" (printf "%s:8080" $any) -}}
{{- $_ := set $own "router.admin" (printf "%s:50052" (ternary $any (include "pdcluster.loopback" .) (ne $admin ""))) -}}
{{- $_ := set $own "router.workers" .Values.router.workers -}}
{{- $_ := set $own "router.drain_s" .Values.router.drainSeconds -}}
{{- if .Values.tracing.otlp }}{{ $_ := set $own "router.tracing.sample_percent" .Values.tracing.samplePercent }}{{ end -}}
{{- if .Values.console.enabled -}}
{{- $_ := set $own "router.console" (printf "%s:8001" (ternary $any (include "pdcluster.loopback" .) (ne $console ""))) -}}
{{- with .Values.console.hosts }}{{ $_ := set $own "router.console_hosts" (join "," .) }}{{ end -}}
{{- end -}}
{{- if $token }}{{ $_ := set $own "router.admin_token_file" (printf "/etc/pdcluster/admin/%s" .Values.auth.adminToken.key) }}{{ end -}}
{{- if .Values.router.tls.existingSecret -}}
{{- $_ := set $own "router.tls_cert" "/etc/pdcluster/tls/tls.crt" -}}
{{- $_ := set $own "router.tls_key" "/etc/pdcluster/tls/tls.key" -}}
{{- end -}}
{{- if .Values.auth.tenants.existingSecret }}{{ $_ := set $own "router.tenants" (printf "/etc/pdcluster/tenants/%s" .Values.auth.tenants.key) }}{{ end -}}
{{- if .Values.auth.clusterKey.existingSecret -}}
{{- $_ := set $own "router.security.cluster_key_file" (printf "/etc/pdcluster/cluster/%s" .Values.auth.clusterKey.key) -}}
{{- end -}}
{{- if $scaled }}{{ $_ := set $own "router.scaler" (printf "%s:50053" $any) }}{{ end -}}
{{- if $scalerToken }}{{ $_ := set $own "router.scaler_token_file" (printf "/etc/pdcluster/scaler/%s" .Values.auth.scalerToken.key) }}{{ end -}}
{{- $own = merge $own (include "pdcluster.fromZero" . | fromYaml) -}}
{{ include "pdcluster.podBase" (dict "root" . "places" .Values.router) }}
terminationGracePeriodSeconds: {{ add (int64 .Values.router.preStopSeconds) (int64 .Values.router.drainSeconds) 10 }}
containers:
  - name: router
    image: {{ include "pdcluster.image" (dict "root" . "name" .Values.image.router) }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    args:
      - pdcluster-router
      {{- include "pdcluster.settingsArgs" (dict "root" . "section" "router" "own" $own "given" .Values.router.settings "where" "router.settings") | nindent 6 }}
    env:
      {{- include "pdcluster.env" . | nindent 6 }}
      {{- with .Values.router.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    ports:
      - {name: http, containerPort: 8000}
      - {name: grpc, containerPort: 50051}
      - {name: health, containerPort: 8080}
      {{- if $scaled }}
      - {name: scaler, containerPort: 50053}
      {{- end }}
      {{- if $admin }}
      - {name: admin, containerPort: 50052}
      {{- end }}
      {{- if and $console .Values.console.enabled }}
      - {name: console, containerPort: 8001}
      {{- end }}
    # Services stop sending to the pod before it is told to drain.
    lifecycle:
      preStop:
        sleep: {seconds: {{ int64 .Values.router.preStopSeconds }}}
    {{- include "pdcluster.probes" (dict "startup" "livez" "minutes" 5) | nindent 4 }}
    resources:
      {{- toYaml .Values.router.resources | nindent 6 }}
    securityContext:
      {{- include "pdcluster.containerSecurity" (dict) | nindent 6 }}
    volumeMounts:
      - {name: cache, mountPath: /cache}
      - {name: tmp, mountPath: /tmp}
      {{- if $token }}
      - {name: admin-token, mountPath: /etc/pdcluster/admin, readOnly: true}
      {{- end }}
      {{- if $scalerToken }}
      - {name: scaler-token, mountPath: /etc/pdcluster/scaler, readOnly: true}
      {{- end }}
      {{- if .Values.router.tls.existingSecret }}
      - {name: tls, mountPath: /etc/pdcluster/tls, readOnly: true}
      {{- end }}
      {{- if .Values.auth.tenants.existingSecret }}
      - {name: tenants, mountPath: /etc/pdcluster/tenants, readOnly: true}
      {{- end }}
      {{- if .Values.auth.clusterKey.existingSecret }}
      - {name: cluster-key, mountPath: /etc/pdcluster/cluster, readOnly: true}
      {{- end }}
volumes:
  - {name: cache, emptyDir: {sizeLimit: 1Gi}}
  - {name: tmp, emptyDir: {}}
  {{- with $token }}
  - {name: admin-token, secret: {secretName: {{ toJson . }}, defaultMode: 288}}
  {{- end }}
  {{- with $scalerToken }}
  - {name: scaler-token, secret: {secretName: {{ toJson . }}, defaultMode: 288}}
  {{- end }}
  {{- with .Values.router.tls.existingSecret }}
  - {name: tls, secret: {secretName: {{ toJson . }}, defaultMode: 288}}
  {{- end }}
  {{- with .Values.auth.tenants.existingSecret }}
  - {name: tenants, secret: {secretName: {{ toJson . }}, defaultMode: 288}}
  {{- end }}
  {{- with .Values.auth.clusterKey.existingSecret }}
  - {name: cluster-key, secret: {secretName: {{ toJson . }}, defaultMode: 288}}
  {{- end }}
{{- end -}}

{{/* Whether routers are asked how many nodes a pool, or any pool, needs: text or none. */}}
{{- define "pdcluster.asksRouters" -}}
{{- if and .autoscaling.enabled (eq .autoscaling.by "router") }}yes{{ end -}}
{{- end -}}
{{- define "pdcluster.scaled" -}}
{{- range .Values.pools -}}
{{- include "pdcluster.asksRouters" (mergeOverwrite (deepCopy $.Values.poolDefaults) .) -}}
{{- end -}}
{{- end -}}

{{/* What routers are told where a pool has no nodes at times: requests wait while the first ones start, and then run as long as ever. */}}
{{- define "pdcluster.fromZero" -}}
{{- $minutes := 0 -}}
{{- range .Values.pools -}}
{{- $pool := mergeOverwrite (deepCopy $.Values.poolDefaults) . -}}
{{- if and $pool.autoscaling.enabled (not (int64 $pool.autoscaling.minReplicas)) }}{{ $minutes = max $minutes (int64 $pool.startupMinutes) }}{{ end -}}
{{- end -}}
{{- if $minutes -}}
{{- $given := .Values.router.settings -}}
{{- $age := include "pdcluster.seconds" (get $given "router.hold.age_s" | default (mul $minutes 60)) | int64 -}}
{{- $deadline := include "pdcluster.seconds" (get $given "router.deadline_s" | default (add $age 600)) | int64 -}}
{{- if lt $deadline $age -}}
{{- fail (printf "router.deadline_s ends requests after %d s, before the %d s that they may wait for a first node (router.hold.age_s); lengthen it" $deadline $age) -}}
{{- end -}}
router.from_zero: true
{{- if not (hasKey $given "router.hold.age_s") }}
router.hold.age_s: {{ $age }}
{{- end }}
{{- if not (hasKey $given "router.deadline_s") }}
router.deadline_s: {{ $deadline }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* A duration as settings take it, in seconds. */}}
{{- define "pdcluster.seconds" -}}
{{- $text := include "pdcluster.text" . -}}
{{- $unit := regexFind "(ms|s|m|h)$" $text -}}
{{- mulf (trimSuffix $unit $text | trim | float64) (get (dict "ms" 0.001 "s" 1.0 "" 1.0 "m" 60.0 "h" 3600.0) $unit) | floor | int64 -}}
{{- end -}}
