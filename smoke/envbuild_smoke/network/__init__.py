"""What the network of a run has to be, and which ranks measure it: pure, for the runner and for the judge."""
