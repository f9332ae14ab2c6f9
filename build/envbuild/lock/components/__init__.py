"""Which release or commit each component of a stack is: the stack, the pins, upstream and declared ranges."""
