{{- define "holdfast.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "holdfast.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "holdfast.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "holdfast.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "holdfast.serviceAccount" -}}
{{- default (include "holdfast.fullname" .) .Values.serviceAccount.name -}}
{{- end }}

{{- define "holdfast.image" -}}
{{- printf "%s:%s" .image.repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end }}

{{- define "holdfast.serviceHost" -}}
{{- if .Values.service.clusterIP -}}
{{- if contains ":" .Values.service.clusterIP }}[{{ .Values.service.clusterIP }}]{{ else }}{{ .Values.service.clusterIP }}{{ end -}}
{{- else -}}
{{- printf "%s.%s.svc" (include "holdfast.fullname" .) .Release.Namespace -}}
{{- end -}}
{{- end }}

{{- define "holdfast.agentsUrl" -}}
{{- default (printf "https://%s:8443" (include "holdfast.serviceHost" .)) .Values.agents.url -}}
{{- end }}

{{- /* Names in the operator's certificate: all by which a sidecar may call it. */ -}}
{{- define "holdfast.tlsNames" -}}
{{- $service := include "holdfast.fullname" . -}}
{{- $namespace := .Release.Namespace -}}
{{- $names := list $service (printf "%s.%s" $service $namespace) (printf "%s.%s.svc" $service $namespace) (printf "%s.%s.svc.cluster.local" $service $namespace) -}}
{{- if .Values.service.clusterIP }}{{ $names = append $names .Values.service.clusterIP }}{{ end -}}
{{- if .Values.agents.url -}}
{{- $host := regexReplaceAll ":[0-9]+$" (trimPrefix "https://" .Values.agents.url) "" -}}
{{- $names = append $names (trimPrefix "[" (trimSuffix "]" $host)) -}}
{{- end -}}
{{- concat $names .Values.agents.extraNames | uniq | join "," -}}
{{- end }}

{{- /* What the operator reads, without what is about its pod; wrong pairs of values are refused here by name. */ -}}
{{- define "holdfast.nodeRemediation" -}}
{{- $values := .Values.nodeRemediation -}}
{{- if and (ne $values.mode "Observe") (not $values.token.secretName) -}}
{{- fail (printf "nodeRemediation.mode is %s and nodeRemediation.token.secretName is empty: no alert could come" $values.mode) -}}
{{- end -}}
{{- if and (eq $values.mode "Replace") (not $values.provider) -}}
{{- fail "nodeRemediation.mode is Replace: set nodeRemediation.provider, or choose Drain" -}}
{{- end -}}
{{- if and .Values.watchNamespaces (or (ne $values.mode "Observe") $values.token.secretName) -}}
{{- fail "nodeRemediation is about whole nodes, watchNamespaces about some namespaces: choose one of the two" -}}
{{- end -}}
{{- omit $values "token" | toJson -}}
{{- end }}
