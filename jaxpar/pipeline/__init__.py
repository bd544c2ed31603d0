"""Runs the stages of a model one behind the other, as a schedule says."""

from jaxpar.pipeline.derive import Pipelined, pipelined

__all__ = ["Pipelined", "pipelined"]
