{{- define "pdcluster.name" -}}
{{- .Values.nameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels by which a component's pods are chosen. Takes the root, component and pool. */}}
{{- define "pdcluster.selector" -}}
app.kubernetes.io/name: pdcluster
app.kubernetes.io/instance: {{ toJson .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
pdcluster.io/pool: {{ toJson . }}
{{- end }}
{{- end -}}

{{- define "pdcluster.labels" -}}
{{ include "pdcluster.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "pdcluster.podMetadata" -}}
labels:
  {{- include "pdcluster.labels" . | nindent 2 }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A name with a digest or a tag of its own is whole; another one gets the chart's tag. */}}
{{- define "pdcluster.image" -}}
{{- if regexMatch "(@sha256:[0-9a-f]{64}|:[A-Za-z0-9_][A-Za-z0-9_.-]*)$" .name -}}
{{ .name | toJson }}
{{- else -}}
{{ printf "%s:%s" .name (.root.Values.image.tag | default .root.Chart.AppVersion) | toJson }}
{{- end -}}
{{- end -}}

{{/* The cluster's one engine: that of its first pool. */}}
{{- define "pdcluster.engine" -}}
{{- (index .Values.pools 0).engine | default .Values.poolDefaults.engine -}}
{{- end -}}

{{- define "pdcluster.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "pdcluster.name" .) -}}
{{- end -}}

{{/* The address that stands for all of a pod's own, and a pod's own as a host in HOST:PORT. */}}
{{- define "pdcluster.anyHost" -}}
{{- if eq .Values.ipFamily "IPv6" }}[::]{{ else }}0.0.0.0{{ end -}}
{{- end -}}
{{- define "pdcluster.podHost" -}}
{{- if eq .Values.ipFamily "IPv6" }}[$(POD_IP)]{{ else }}$(POD_IP){{ end -}}
{{- end -}}
{{- define "pdcluster.loopback" -}}
{{- if eq .Values.ipFamily "IPv6" }}[::1]{{ else }}127.0.0.1{{ end -}}
{{- end -}}

{{/* HOST:PORT of every bootstrap. */}}
{{- define "pdcluster.bootstraps" -}}
{{- $name := include "pdcluster.name" . -}}
{{- $found := list -}}
{{- range until (int .Values.bootstrap.replicas) -}}
{{- $found = append $found (printf "%s-bootstrap-%d.%s-bootstrap.%s.svc:8998" $name . $name $.Release.Namespace) -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}

{{/* A value as text. Numbers of a values file are floats, which print as 1e+06 otherwise. */}}
{{- define "pdcluster.text" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end -}}
{{- end -}}

{{/*
Settings as arguments. Takes the root, the section, `own`: what the chart sets, and `given`: what the user adds under `where`.
What all processes of a section share is added to `own`.
*/}}
{{- define "pdcluster.settingsArgs" -}}
{{- $section := .section -}}
{{- $own := .own -}}
{{- $_ := set $own (printf "%s.log.level" $section) .root.Values.log.level -}}
{{- $_ := set $own (printf "%s.log.format" $section) .root.Values.log.format -}}
{{- $_ := set $own (printf "%s.log.requests" $section) .root.Values.log.requests -}}
{{- with .root.Values.auth.insecure }}{{ $_ := set $own (printf "%s.insecure" $section) (join "," .) }}{{ end -}}
{{- if and .root.Values.tracing.otlp (ne $section "bootstrap") -}}
{{- $_ := set $own (printf "%s.tracing.otlp" $section) .root.Values.tracing.otlp -}}
{{- end -}}
{{- range $key, $_ := .given -}}
{{- if hasKey $own $key -}}
{{- fail (printf "%s has %s, which the chart sets itself; remove it there and use the chart's own value" $.where $key) -}}
{{- end -}}
{{- end -}}
{{- range $settings := list .own .given }}
{{- range $key, $value := $settings }}
- {{ printf "--set=%s=%s" $key (include "pdcluster.text" $value) | toJson }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "pdcluster.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: PDCLUSTER_CACHE_DIR
  value: /cache/pdcluster
{{- end -}}

{{/* What all pods have. Takes the root, and where pods may run. */}}
{{- define "pdcluster.podBase" -}}
serviceAccountName: {{ include "pdcluster.serviceAccount" .root | toJson }}
automountServiceAccountToken: false
# A Service whose name begins with pdcluster would set variables that processes refuse.
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ toJson . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- include "pdcluster.scheduling" .places }}
{{- end -}}

{{/*
Merges a part of a pod's spec into the spec. Takes the two; changes the first. Maps are merged and null removes a field. Containers
are merged by name. Volumes, variables, mounts and ports replace those of the same name. Other lists replace the chart's.
*/}}
{{- define "pdcluster.merge" -}}
{{- $base := index . 0 -}}
{{- $names := dict "containers" "name" "initContainers" "name" "volumes" "name" "env" "name" "imagePullSecrets" "name" -}}
{{- $names = merge $names (dict "volumeMounts" "mountPath" "ports" "containerPort" "topologySpreadConstraints" "topologyKey") -}}
{{- range $field, $value := index . 1 -}}
{{- $had := get $base $field -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $base $field -}}
{{- else if and (kindIs "map" $value) (kindIs "map" $had) -}}
{{- include "pdcluster.merge" (list $had $value) -}}
{{- else if and (kindIs "slice" $value) (kindIs "slice" $had) (hasKey $names $field) -}}
{{- $name := get $names $field -}}
{{- $kept := list -}}
{{- range $old := $had -}}
{{- $new := dict -}}
{{- range $value }}{{ if eq (toString (get . $name)) (toString (get $old $name)) }}{{ $new = . }}{{ end }}{{ end -}}
{{- if hasSuffix "ontainers" $field -}}
{{- include "pdcluster.merge" (list $old $new) -}}
{{- $kept = append $kept $old -}}
{{- else -}}
{{- $kept = append $kept ($new | default $old) -}}
{{- end -}}
{{- end -}}
{{- range $value -}}
{{- $given := . -}}
{{- $is_new := true -}}
{{- range $had }}{{ if eq (toString (get . $name)) (toString (get $given $name)) }}{{ $is_new = false }}{{ end }}{{ end -}}
{{- if $is_new }}{{ $kept = append $kept $given }}{{ end -}}
{{- end -}}
{{- $_ := set $base $field $kept -}}
{{- else -}}
{{- $_ := set $base $field $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A pod's spec with what the user merges into it. Takes the spec as text, and `pod`. */}}
{{- define "pdcluster.mergedPod" -}}
{{- $spec := index . 0 | fromYaml -}}
{{- with $spec.Error }}{{ fail (printf "the chart made a pod that is no YAML: %s" .) }}{{ end -}}
{{- include "pdcluster.merge" (list $spec (index . 1 | deepCopy)) -}}
{{- toYaml $spec -}}
{{- end -}}

{{- define "pdcluster.scheduling" -}}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with get $ $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Probes of the health port. Takes startup minutes. */}}
{{- define "pdcluster.probes" -}}
startupProbe:
  httpGet: {path: /{{ .startup }}, port: health}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ mul (int .minutes) 12 }}
livenessProbe:
  httpGet: {path: /livez, port: health}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: health}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}

{{- define "pdcluster.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with .add }}
  add: {{ toJson . }}
  {{- end }}
{{- end -}}

{{/* Whether others than port-forward reach admin or console: text or none. Takes the root and the surface. */}}
{{- define "pdcluster.isReached" -}}
{{- if or .root.Values.auth.adminToken.existingSecret (has .surface .root.Values.auth.insecure) }}yes{{ end -}}
{{- end -}}

{{/* Fails with the two ways out where a surface would be open that nobody said may be. No secret is made here: it would lie in the release's values. */}}
{{- define "pdcluster.checkSecrets" -}}
{{- $missing := list -}}
{{- range list "bootstrap" "links" "kv" }}{{ if not (has . $.Values.auth.insecure) }}{{ $missing = append $missing . }}{{ end }}{{ end -}}
{{- if and $missing (not .Values.auth.clusterKey.existingSecret) -}}
{{- fail (include "pdcluster.noSecret" (dict "root" . "what" "cluster key" "name" "clusterKey" "surfaces" (list "bootstrap" "links" "kv"))) -}}
{{- end -}}
{{- if and (include "pdcluster.scaled" .) (not .Values.auth.scalerToken.existingSecret) (not (has "scaler" .Values.auth.insecure)) -}}
{{- fail (include "pdcluster.noSecret" (dict "root" . "what" "scaler token, and pools scale by router" "name" "scalerToken" "surfaces" (list "scaler"))) -}}
{{- end -}}
{{- end -}}

{{- define "pdcluster.noSecret" -}}
{{- $secret := printf "%s-%s" (include "pdcluster.name" .root) (kebabcase .name) -}}
{{- $key := get (get .root.Values.auth .name) "key" -}}
there is no {{ .what }}; make one and name it:

  kubectl -n {{ .root.Release.Namespace }} create secret generic {{ $secret }} --from-literal={{ $key }}=$(openssl rand -hex 32)
  --set auth.{{ .name }}.existingSecret={{ $secret }}

or leave {{ join ", " .surfaces }} open to every pod that gets there:

  --set 'auth.insecure={{ "{" }}{{ concat .root.Values.auth.insecure .surfaces | uniq | join "," }}{{ "}" }}'
{{ end -}}

{{/* Fails with the way out where values contradict each other. */}}
{{- define "pdcluster.check" -}}
{{- include "pdcluster.checkSecrets" . -}}
{{- if and .Values.weights.source (not .Values.weights.label) -}}
{{- fail (printf "weights.source is %s and weights.label is empty; give the weights a label" .Values.weights.source) -}}
{{- end -}}
{{- if .Values.weights.label -}}
{{- if not .Values.weights.source -}}
{{- fail (printf "weights.label is %s and weights.source is empty; say where nodes find these weights" .Values.weights.label) -}}
{{- end -}}
{{- if not (include "pdcluster.isReached" (dict "root" . "surface" "admin")) -}}
{{- fail "weights.label needs the Admin of the routers; set auth.adminToken.existingSecret" -}}
{{- end -}}
{{- if .Values.router.tls.existingSecret -}}
{{- fail "weights.label and router.tls are set, but the Job has no CA to check the routers by; load weights with pdctl weights load --ca" -}}
{{- end -}}
{{- end -}}
{{- $sources := list -}}
{{- $fill := .Values.model.pvc.fill.enabled -}}
{{- if $fill -}}
{{- if not (and .Values.model.hub.name .Values.model.pvc.claim .Values.model.pvc.path) -}}
{{- fail "model.pvc.fill needs model.hub.name, model.pvc.claim and model.pvc.path: what is downloaded, and where to" -}}
{{- end -}}
{{- else if .Values.model.hub.name -}}
{{- $sources = append $sources "model.hub.name" -}}
{{- end -}}
{{- with .Values.model.pvc.claim }}{{ $sources = append $sources "model.pvc.claim" }}{{ end -}}
{{- with .Values.model.hostPath.path }}{{ $sources = append $sources "model.hostPath.path" }}{{ end -}}
{{- with .Values.model.image.reference }}{{ $sources = append $sources "model.image.reference" }}{{ end -}}
{{- if gt (len $sources) 1 -}}
{{- fail (printf "%s are set; a model comes from one place, so keep one of them, or let model.pvc.fill bring it from the hub into the claim" (join " and " $sources)) -}}
{{- end -}}
{{- $names := list -}}
{{- $roles := list -}}
{{- range .Values.pools -}}
{{- if has .name $names }}{{ fail (printf "two pools are named %s; give each a name of its own" .name) }}{{ end -}}
{{- if has .name (list "router" "bootstrap") -}}
{{- fail (printf "a pool is named %s, as the cluster's own objects are; give it another name" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- $roles = append $roles .role -}}
{{- end -}}
{{- if and (not (has "mixed" $roles)) (or (not (has "prefill" $roles)) (not (has "decode" $roles))) -}}
{{- fail (printf "the pools are %s; a cluster needs prefill and decode, or mixed" (join ", " $roles)) -}}
{{- end -}}
{{- range .Values.pools -}}
{{- $role := .role -}}
{{- $same := 0 -}}
{{- range $roles }}{{ if eq . $role }}{{ $same = add1 $same }}{{ end }}{{ end -}}
{{- $pool := mergeOverwrite (deepCopy $.Values.poolDefaults) . -}}
{{- if ne $pool.engine (include "pdcluster.engine" $) -}}
{{- fail (printf "pool %s has engine %s and another pool has %s; a cluster has one engine" .name $pool.engine (include "pdcluster.engine" $)) -}}
{{- end -}}
{{- if and (eq $pool.engine "vllm") (gt (int64 $pool.tp) 1) -}}
{{- fail (printf "pool %s has engine vllm and tp; give vLLM --tensor-parallel-size in vllm.args" .name) -}}
{{- end -}}
{{- if hasKey $pool.settings "node.vllm.args" -}}
{{- fail (printf "pool %s has node.vllm.args in its settings, which vllm.args would replace; give vLLM's arguments as vllm.args" .name) -}}
{{- end -}}
{{- if and (eq $pool.engine "vllm") (hasKey $pool.settings "node.tp") -}}
{{- fail (printf "pool %s has engine vllm and node.tp in its settings; give vLLM --tensor-parallel-size in vllm.args" .name) -}}
{{- end -}}
{{- if and (ne $pool.engine "vllm") $pool.vllm.args -}}
{{- fail (printf "pool %s has vllm.args and engine %s; set engine: vllm" .name $pool.engine) -}}
{{- end -}}
{{- if and $pool.hostNetwork $.Values.networkPolicy.enabled (not $.Values.networkPolicy.machines) -}}
{{- fail (printf "pool %s uses the machines' network, so no policy chooses its pods; set networkPolicy.machines to the machines' addresses, or networkPolicy.enabled to false" .name) -}}
{{- end -}}
{{- $last := sub (add (int64 $pool.ports.transfer) (int64 $pool.tp)) 1 -}}
{{- $inner := and (ge (int64 $pool.ports.node) (int64 $pool.ports.transfer)) (le (int64 $pool.ports.node) $last) -}}
{{- if or $inner (eq (int64 $pool.ports.node) (int64 $pool.ports.health)) (and (ge (int64 $pool.ports.health) (int64 $pool.ports.transfer)) (le (int64 $pool.ports.health) $last)) (gt $last 65535) -}}
{{- fail (printf "pool %s has the ports node %d, health %d and %d to %d for KV; give each its own, up to 65535" .name (int64 $pool.ports.node) (int64 $pool.ports.health) (int64 $pool.ports.transfer) $last) -}}
{{- end -}}
{{- if $pool.autoscaling.enabled -}}
{{- if gt (int $same) 1 -}}
{{- fail (printf "pool %s scales, and another pool of role %s; the routers count nodes by role, so keep one of them" .name .role) -}}
{{- end -}}
{{- if and (eq $pool.autoscaling.by "prometheus") (not $.Values.autoscaling.prometheus) -}}
{{- fail (printf "pool %s scales by prometheus, and autoscaling.prometheus is empty; set its address" .name) -}}
{{- end -}}
{{- if gt (int $pool.autoscaling.minReplicas) (int $pool.autoscaling.maxReplicas) -}}
{{- fail (printf "pool %s has autoscaling.minReplicas above maxReplicas" .name) -}}
{{- end -}}
{{- if eq (toString (get $.Values.router.settings "router.auto_roles")) "true" -}}
{{- fail (printf "pool %s scales, and router.auto_roles changes roles; the two would undo each other, so keep one" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) -}}
{{- fail "ingress.enabled needs ingress.host" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs" -}}
{{- end -}}
{{- end -}}
