"""What lies on disk: kinds of folders, their files, what a value is stored as."""
