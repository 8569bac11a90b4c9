"""Stand-ins for what surrounds Holdfast: clouds, GPU metrics, object storage, sidecars, faulty connections."""
