"""A load generator that is fair: both arms, the same prompts, the same arrivals, the same number of tokens."""
