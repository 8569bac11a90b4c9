"""Faults done to a running job on purpose, and what they cost: shared by the demo and the end-to-end tests."""
