"""`holdfast checkpoints …`: lists, verifies, copies and deletes checkpoints without a job. Imports no torch."""
