"""`make demo`: a FaultTolerantJob on a real local Kubernetes, with injected faults and a live report."""
