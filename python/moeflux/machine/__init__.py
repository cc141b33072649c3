"""This machine: what it is, what memory it has, what `moeflux doctor` found on it."""
