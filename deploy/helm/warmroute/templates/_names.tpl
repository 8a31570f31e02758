{{- define "warmroute.name" -}}
{{- if contains "warmroute" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-warmroute{{ end }}
{{- end }}

{{- define "warmroute.selector" -}}
app.kubernetes.io/name: warmroute
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "warmroute.labels" -}}
{{ include "warmroute.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "warmroute.redis" -}}
{{- if or .Values.redis.existingSecret .Values.redis.url }}yes{{ end }}
{{- end }}

{{- define "warmroute.config" -}}
{{- $set := dict "listen" (dict "host" "0.0.0.0" "port" 8080) "metrics" (dict "host" "0.0.0.0" "port" 9464) "health" (dict "host" "0.0.0.0" "port" 8082) }}
{{- $replicas := dict }}
{{- if include "warmroute.redis" . }}
{{- $scope := .Values.redis.scope | default (printf "%s-%s" .Release.Namespace .Release.Name) }}
{{- $replicas = dict "replicas" (dict "redis" "${WARMROUTE_REDIS}" "scope" $scope) }}
{{- end }}
{{- mergeOverwrite (deepCopy .Values.config) $set $replicas | toYaml }}
{{- end }}
