"""Sick nodes: alerts in, nodes cordoned, drained and replaced. Off unless it is asked for."""
