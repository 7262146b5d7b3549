"""Spec, command line and the Ray controller that places, drives and supervises a run."""
