"""`make demo`: a FaultTolerantJob on a local real Kubernetes, hurt on purpose, with the story printed as it happens."""
