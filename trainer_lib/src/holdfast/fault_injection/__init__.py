"""`holdfast chaos`: injects faults into a user's training and reports their cost."""
