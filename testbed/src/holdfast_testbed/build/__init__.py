"""The parts of a cluster: Python environment, programs and images. `bootstrap` needs only the standard library."""
