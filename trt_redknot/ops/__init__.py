"""The named ops the network is written over: the interface, the tables they read, and one folder a backend."""
