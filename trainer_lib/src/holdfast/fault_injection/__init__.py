"""`holdfast chaos`: hurts a user's own training on purpose, and says what it cost."""
