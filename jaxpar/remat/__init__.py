"""Rematerialisation: which blocks compute their values again in the backward pass."""
