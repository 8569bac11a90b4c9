"""Remediation of faulty nodes: alerts lead to cordoned, drained and replaced nodes. Off by default."""
