"""What binds a kernel on a GPU, read from its machine code."""
