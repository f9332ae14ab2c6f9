"""The wheelhouse: entries by build key, shared with remote stores, taken by installs, pruned."""
