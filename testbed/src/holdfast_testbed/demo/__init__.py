"""`make demo`: a FaultTolerantJob on a local real Kubernetes, hurt on purpose, its story told as it happens."""
