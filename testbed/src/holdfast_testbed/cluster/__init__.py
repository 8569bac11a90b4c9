"""A cluster: addresses, certificates, control plane, recorded state and removal."""
