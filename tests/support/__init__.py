"""What tests share: models to run, folders to read, checks, tolerances."""
