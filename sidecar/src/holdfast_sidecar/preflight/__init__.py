"""Checks whether the pod's node suits the job, before the pod may join (`spec.preflight`)."""
