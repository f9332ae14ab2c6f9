"""The uv project that is resolved, and the plan that it is made from."""
