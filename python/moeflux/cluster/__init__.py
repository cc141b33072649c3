"""One model over several machines: docs/cluster.md. Nothing here imports Ray or ZeroMQ before a model is loaded so."""
