"""The network, defined once as layer functions over named ops. Knows no backend, no rank, no file."""
