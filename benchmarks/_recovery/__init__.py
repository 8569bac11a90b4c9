"""The parts of the recovery benchmark: one workload, three ways to train it, one observer."""
