"""Functions of users: modifiers and masks, one NumPy-style definition each, and what runs them."""
