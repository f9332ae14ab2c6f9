"""A matrix becomes cases, each checked against the rules of its layout before anything starts."""
