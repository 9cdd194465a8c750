"""Where the models are: adapters to other libraries, which translate and compute nothing.

Each module needs the library that it is named after; nothing here is imported but by the user.
"""
