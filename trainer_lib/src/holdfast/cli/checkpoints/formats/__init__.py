"""Other formats: weights of torch, safetensors and DCP into a commit, and a commit's weights out for others to load.

Nothing that is read here may run code: what would need that is refused by name.
"""
