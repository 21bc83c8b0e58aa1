"""Data: the order of samples, their division among ranks, fetching, streams, and the place in an epoch."""
