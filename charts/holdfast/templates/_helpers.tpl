{{- define "holdfast.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end }}

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

{{- define "holdfast.chart" -}}
{{- printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" -}}
{{- end }}

{{- define "holdfast.selectorLabels" -}}
app.kubernetes.io/name: {{ include "holdfast.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "holdfast.labels" -}}
helm.sh/chart: {{ include "holdfast.chart" . }}
{{ include "holdfast.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "holdfast.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "holdfast.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{- /* Dict of `root` and `image`. A digest takes the place of the tag. */ -}}
{{- define "holdfast.image" -}}
{{- $registry := default .image.registry (.root.Values.global).imageRegistry -}}
{{- $repository := list $registry .image.repository | compact | join "/" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end }}

{{- define "holdfast.imagePullSecrets" -}}
{{- range .Values.imagePullSecrets }}
- name: {{ . }}
{{- end }}
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

{{- /* All names by which a sidecar may call the operator, for the certificate of the built-in CA. */ -}}
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

{{- /* The operator's settings for node remediation. Combinations of values that cannot work fail here by name. */ -}}
{{- define "holdfast.nodeRemediation" -}}
{{- $values := .Values.nodeRemediation -}}
{{- if and (ne $values.mode "Observe") (not $values.token.secretName) -}}
{{- fail (printf "nodeRemediation.mode is %s and nodeRemediation.token.secretName is empty, so no alert can arrive: set the name of the token's Secret" $values.mode) -}}
{{- end -}}
{{- if and (eq $values.mode "Replace") (not $values.provider) -}}
{{- fail "nodeRemediation.mode is Replace: set nodeRemediation.provider, or choose Drain" -}}
{{- end -}}
{{- if and .Values.watchNamespaces (or (ne $values.mode "Observe") $values.token.secretName) -}}
{{- fail "nodeRemediation concerns whole nodes and watchNamespaces some namespaces: set only one of them" -}}
{{- end -}}
{{- omit $values "token" | toJson -}}
{{- end }}

{{- /* The permissions for jobs, in their namespaces. */ -}}
{{- define "holdfast.jobRules" -}}
- apiGroups: [holdfast.dev]
  resources: [faulttolerantjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [holdfast.dev]
  resources: [faulttolerantjobs/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, create, patch]
{{- if .Values.networkPolicy.jobs }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, patch]
{{- end }}
{{- if .Values.disruptionBudgets.jobs }}
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch]
{{- end }}
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
# The kubelet and the scheduler report only in events why a pod does not start.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
{{- end }}

{{- /* Several installations that watch namespaces of their own can exist side by side. */ -}}
{{- define "holdfast.clusterRole" -}}
{{- include "holdfast.fullname" . }}{{ if .Values.watchNamespaces }}-{{ .Release.Namespace }}{{ end }}
{{- end -}}

{{- /* Dict of `root` and `labels`. */ -}}
{{- define "holdfast.monitoringLabels" -}}
{{- include "holdfast.labels" .root }}
{{- with .labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "holdfast.testName" -}}
{{- printf "%s-test" (include "holdfast.fullname" .) -}}
{{- end }}

{{- define "holdfast.testMeta" -}}
labels:
  helm.sh/chart: {{ include "holdfast.chart" . }}
  app.kubernetes.io/name: {{ include "holdfast.name" . }}
  app.kubernetes.io/instance: {{ .Release.Name }}
  app.kubernetes.io/component: test
annotations:
  helm.sh/hook: test
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{- /* A namespace whose jobs this installation runs. */ -}}
{{- define "holdfast.testNamespace" -}}
{{- if .Values.watchNamespaces }}{{ first .Values.watchNamespaces }}{{ else }}{{ .Release.Namespace }}{{ end -}}
{{- end }}

{{- /* The job of `helm test`: two workers that do nothing. */ -}}
{{- define "holdfast.testContainer" -}}
name: trainer
image: {{ include "holdfast.image" (dict "image" .Values.test.image "root" .) }}
imagePullPolicy: {{ .Values.test.image.pullPolicy }}
command: [holdfast, run, --, python, -c, "print('holdfast test')"]
resources:
  requests: {cpu: 100m, memory: 256Mi}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "holdfast.testPodSpec" -}}
{{- $container := mergeOverwrite (include "holdfast.testContainer" . | fromYaml) .Values.test.container -}}
{{- $spec := dict "automountServiceAccountToken" false "securityContext" (deepCopy .Values.podSecurityContext) "containers" (list $container) -}}
{{- mergeOverwrite $spec .Values.test.podSpec | toYaml -}}
{{- end }}

{{- define "holdfast.testJob" -}}
apiVersion: holdfast.dev/v1alpha1
kind: FaultTolerantJob
metadata:
  name: {{ include "holdfast.testName" . }}
  namespace: {{ include "holdfast.testNamespace" . }}
spec:
  workers:
    replicas: 2
    template:
      spec:
        {{- include "holdfast.testPodSpec" . | nindent 8 }}
{{- end }}
