"""What a model and a machine are, can do and need."""
