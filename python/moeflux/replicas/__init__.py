"""One model, loaded several times, as an application of Ray Serve: docs/cluster.md."""
