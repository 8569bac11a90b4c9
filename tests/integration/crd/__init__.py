"""A package, so that its tests can import the jobs that they share."""
