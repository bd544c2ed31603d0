"""Ahead-of-time compilation for TPUs that are not there."""
