"""Faults that are injected into a running job, and their cost: shared by the demo and the end-to-end tests."""
