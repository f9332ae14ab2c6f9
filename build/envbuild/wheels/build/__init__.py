"""Compiles wheels: one queue of compilers, one architecture, builds that go on."""
