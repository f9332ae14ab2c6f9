"""The record of what was locked, built, certified and published, and of the nights that did it."""
