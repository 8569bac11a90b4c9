"""`holdfast checkpoints …`: looking at commits, checking, copying and letting go of them, without a job. No torch."""
