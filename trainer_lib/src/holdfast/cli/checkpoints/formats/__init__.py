"""Other formats: imports weights of torch, safetensors and DCP into a checkpoint, and exports weights.

Reading a file never runs code: content that would need it is rejected by name.
"""
