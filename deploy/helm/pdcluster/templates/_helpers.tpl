{{- define "pdcluster.name" -}}
{{- .Values.nameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels by which a component's pods are chosen. Takes the root, component and pool. */}}
{{- define "pdcluster.selector" -}}
app.kubernetes.io/name: pdcluster
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
pdcluster.io/pool: {{ . }}
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

{{- define "pdcluster.image" -}}
{{ .name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
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

{{/* Arguments that all processes of a section share. */}}
{{- define "pdcluster.logArgs" -}}
- --set={{ .section }}.health={{ include "pdcluster.anyHost" .root }}:8080
- --set={{ .section }}.log.level={{ .root.Values.log.level }}
- --set={{ .section }}.log.format={{ .root.Values.log.format }}
- --set={{ .section }}.log.requests={{ .root.Values.log.requests }}
{{- end -}}

{{- define "pdcluster.tracingArgs" -}}
{{- with .root.Values.tracing.otlp }}
- --set={{ $.section }}.tracing.otlp={{ . }}
{{- end }}
{{- end -}}

{{- define "pdcluster.settingsArgs" -}}
{{- range $key, $value := . }}
- --set={{ $key }}={{ if kindIs "float64" $value }}{{ $value | toString }}{{ else }}{{ $value }}{{ end }}
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

{{- define "pdcluster.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "pdcluster.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
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

{{- define "pdcluster.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Fails with the way out where values contradict each other. */}}
{{- define "pdcluster.check" -}}
{{- $sources := list -}}
{{- with .Values.model.hub.name }}{{ $sources = append $sources "model.hub.name" }}{{ end -}}
{{- with .Values.model.pvc.claim }}{{ $sources = append $sources "model.pvc.claim" }}{{ end -}}
{{- with .Values.model.hostPath.path }}{{ $sources = append $sources "model.hostPath.path" }}{{ end -}}
{{- with .Values.model.image.reference }}{{ $sources = append $sources "model.image.reference" }}{{ end -}}
{{- if gt (len $sources) 1 -}}
{{- fail (printf "%s are set; a model comes from one place, so keep one of them" (join " and " $sources)) -}}
{{- end -}}
{{- $names := list -}}
{{- $roles := list -}}
{{- range .Values.pools -}}
{{- if has .name $names }}{{ fail (printf "two pools are named %s; give each a name of its own" .name) }}{{ end -}}
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
