"""The tensorrt backend of engines: plans, what goes into and comes out of them, how they are built."""
