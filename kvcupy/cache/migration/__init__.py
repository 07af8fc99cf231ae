"""Pages on their way to a pool of another process: offered by a sender, pulled by a receiver."""
