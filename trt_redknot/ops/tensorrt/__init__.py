"""Emission of every op into a strongly typed TensorRT network: native layers, or our plugins."""
