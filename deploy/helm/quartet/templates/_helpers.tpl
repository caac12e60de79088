{{- define "quartet.name" -}}
{{- if contains "quartet" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-quartet" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "quartet.selector" -}}
app.kubernetes.io/name: quartet
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "quartet.metadata" -}}
name: {{ include "quartet.name" . }}
labels:
  {{- include "quartet.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- /* Bundles and settings that name an address; "" without one. */}}
{{- define "quartet.remote" -}}
{{- range concat .Values.bundles (list (.Values.settings.models_dir | default "") (.Values.settings.model_sources | default "")) }}
{{- if contains "://" . }}{{ . }}{{ end }}
{{- end }}
{{- end }}

{{- /* The container of the Deployment and of KServe's runtime. */}}
{{- define "quartet.container" -}}
{{- $runtime := eq .Values.kind "ClusterServingRuntime" -}}
name: {{ $runtime | ternary "kserve-container" "quartet" }}
image: {{ .Values.image }}
imagePullPolicy: {{ .Values.imagePullPolicy }}
{{- with $runtime | ternary (list "/mnt/models") .Values.bundles }}
args:
  {{- range . }}
  {{- $whole := or (hasPrefix "/" .) (contains "://" .) }}
  {{- if not (or $whole $.Values.volume) }}
  {{- fail (printf "bundles: %s is a path below volume, which is not set" .) }}
  {{- end }}
  - {{ $whole | ternary . (printf "/models/%s" .) | quote }}
  {{- end }}
{{- end }}
ports:
  {{- if $runtime }}
  # Knative allows one port.
  - {name: http1, containerPort: 8000, protocol: TCP}
  {{- else }}
  - {name: http, containerPort: 8000, protocol: TCP}
  - {name: metrics, containerPort: 9100, protocol: TCP}
  {{- end }}
env:
  {{- if .Values.keysSecret }}
  - {name: QUARTET_API_KEYS, value: /etc/quartet/keys.toml}
  {{- end }}
  - {name: QUARTET_METRICS_PORT, value: "9100"}
  - {name: QUARTET_DRAIN_DELAY_S, value: {{ .Values.drainDelaySeconds | quote }}}
  - {name: QUARTET_DRAIN_S, value: {{ .Values.drainSeconds | quote }}}
  - {name: QUARTET_LOG_FORMAT, value: json}
  {{- if $runtime }}
  # KServe's requests name the InferenceService.
  - {name: QUARTET_UNKNOWN_MODEL, value: default}
  {{- end }}
  {{- if include "quartet.remote" . }}
  - {name: XDG_CACHE_HOME, value: /cache}
  {{- end }}
  {{- range $name, $value := .Values.settings }}
  - {name: QUARTET_{{ upper $name }}, value: {{ kindIs "float64" $value | ternary (toJson $value) (toString $value) | quote }}}
  {{- end }}
{{- with .Values.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
resources:
  {{- toYaml .Values.resources | nindent 2 }}
startupProbe:
  httpGet: {path: /health/ready, port: 8000}
  periodSeconds: 2
  failureThreshold: {{ div (add .Values.startSeconds 1) 2 }}
readinessProbe:
  httpGet: {path: /health/ready, port: 8000}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 1
livenessProbe:
  httpGet: {path: /health/live, port: 8000}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  capabilities: {drop: [ALL]}
  seccompProfile: {type: RuntimeDefault}
volumeMounts:
  {{- if .Values.keysSecret }}
  - {name: keys, mountPath: /etc/quartet, readOnly: true}
  {{- end }}
  {{- if and .Values.volume (not $runtime) }}
  - {name: models, mountPath: /models, readOnly: true}
  {{- end }}
  {{- if include "quartet.remote" . }}
  - {name: cache, mountPath: /cache}
  {{- end }}
  - {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "quartet.volumes" -}}
{{- with .Values.keysSecret }}
- name: keys
  secret: {secretName: {{ . }}}
{{- end }}
{{- if and .Values.volume (eq .Values.kind "Deployment") }}
- name: models
  {{- toYaml .Values.volume | nindent 2 }}
{{- end }}
{{- if include "quartet.remote" . }}
- name: cache
  emptyDir: {sizeLimit: {{ .Values.cacheSize }}}
{{- end }}
- name: tmp
  emptyDir: {}
{{- end }}

{{- /* Fields that pods and KServe's runtimes have in common. */}}
{{- define "quartet.placement" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
