"""What an image must be before it is one: looked at in its finished layers, without a GPU."""
