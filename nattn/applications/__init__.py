"""What is made of the library: the command line, a demo, a page, a model, measurements."""
