"""The nodes of a run: node 0 has the runner, each other one an agent that joins it over TCP."""
