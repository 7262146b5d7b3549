"""GPU workers, optimizer actors and the operators; the operators do not know Ray."""
