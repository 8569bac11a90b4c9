"""This pod's GPUs, as the node's dcgm-exporter sees them.

`exposition` finds them in its text, `judge` decides by the rules in `table` what is wrong, `facts` keeps that for the
operator, `export` for Prometheus; `watch` is the only module with I/O.
"""
