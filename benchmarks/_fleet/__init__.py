"""A fleet of jobs on nodes that kwok plays, for the benchmark of the operator at scale."""
