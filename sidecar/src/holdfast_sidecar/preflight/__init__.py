"""Is this pod's node fit for the job? Asked before the pod may join, where the job wants it (`spec.preflight`)."""
