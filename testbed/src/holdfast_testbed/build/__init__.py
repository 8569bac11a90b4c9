"""What a cluster is made of: Python environment, programs and images. `bootstrap` needs only the standard library."""
