"""A fleet of jobs on simulated nodes (kwok), for the benchmark of the operator at scale."""
