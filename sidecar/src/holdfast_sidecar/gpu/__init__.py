"""This pod's GPUs, as the node's dcgm-exporter sees them.

`exposition` finds them in its text, `detector` decides by `rules` what is wrong, `error_log` keeps that for the
operator, `metrics` for Prometheus; `monitor` is the only module with I/O.
"""
