"""Vectors in the hands of Numba, and the number types that they hold: the ground floor."""
