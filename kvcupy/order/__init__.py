"""Order between streams: the checker, what it knows of bytes and clocks, a simulated scheduler."""
