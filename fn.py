"""Operators for DALI graphs, beside ``nvidia.dali.fn``: ``from dalijax import fn``."""

from .core.functions import read_file as read_file

__all__ = ["read_file"]
