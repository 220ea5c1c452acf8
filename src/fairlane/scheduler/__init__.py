"""The scheduling core: pure functions from a snapshot to a plan, without I/O, clock or chance."""
