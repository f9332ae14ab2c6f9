"""Resolution by uv: the run, questions to uv, prefetching, and conflicts explained."""
