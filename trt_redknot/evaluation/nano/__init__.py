"""The nano network: a small DeepSeek-V4 that answers questions about synthetic documents, its data and its training.

These modules need torch, transformers, tokenizers, safetensors and numpy, and nothing else that is not in every
machine's torch image: training runs where the rest of the package may not be installed.
"""
