"""One model over several machines: docs/cluster.md. Nothing here imports Ray before a model is loaded so."""
