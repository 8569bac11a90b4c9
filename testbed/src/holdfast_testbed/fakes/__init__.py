"""Fakes of Holdfast's environment: clouds, GPU metrics, object storage, sidecars, faulty connections."""
