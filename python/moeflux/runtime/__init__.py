"""What a loaded model is given and keeps: the plan of its memory, saved sessions."""
