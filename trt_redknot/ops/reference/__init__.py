"""Plain-torch references of all ops: the embedded default on a CPU, and what every kernel is tested against."""
